//! Turns the arguments of a call into the messages of the protocol, and says clearly what is wrong with them.

use std::collections::HashMap;
use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};

use crate::errors::{Error, wire_duration};
use crate::ticket::{digest_of_text, digest_of_tokens};
use crate::v1::{self, generate_request, grammar};

/// What to generate after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text; the agent tokenizes it.
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<u32>),
    /// Rendered with the model's own chat template.
    Conversation(Vec<Message>),
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Such as "system", "user" or "assistant".
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A turn of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }

    /// A turn of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(token_ids: Vec<u32>) -> Self {
        Self::Tokens(token_ids)
    }
}

impl From<Vec<Message>> for Prompt {
    fn from(messages: Vec<Message>) -> Self {
        Self::Conversation(messages)
    }
}

impl<const N: usize> From<[Message; N]> for Prompt {
    fn from(messages: [Message; N]) -> Self {
        Self::Conversation(messages.into())
    }
}

/// Class of service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Priority {
    /// A person is waiting.
    Interactive,
    /// The default.
    #[default]
    Standard,
    /// May wait and may be preempted.
    Batch,
}

/// What the output must look like.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Form {
    /// An instance of a schema, given as its text.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// The whole output matches an expression.
    Regex(String),
    /// One of these texts.
    OneOf(Vec<String>),
    /// Follows a Lark grammar.
    Lark(String),
}

/// Options of one generation; `..GenerateOptions::default()` leaves the others at the model's own defaults.
///
/// Ranges are those of `SamplingParameters` and `StopCriteria` in `generation_service.proto`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateOptions {
    /// May be left out where one model is served.
    pub model: Option<String>,
    /// Names the request for `Client::cancel`; one is drawn otherwise.
    pub request_id: Option<String>,
    /// Bounds everything, the wait in the queue included.
    pub deadline: Option<Duration>,
    /// Longest wait in the controller's queue; the policy's otherwise.
    pub max_queue_wait: Option<Duration>,
    /// Class of service.
    pub priority: Priority,
    /// Separates prefix caches that must not be shared.
    pub cache_salt: String,
    /// Most tokens to generate; up to the end of the context otherwise.
    pub max_output_tokens: Option<u32>,
    /// No end before this many tokens.
    pub min_output_tokens: Option<u32>,
    /// Strings that end the output.
    pub stop: Vec<String>,
    /// Token ids that end the output besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Keep the stop string that matched at the end of the text.
    pub include_stop_string: bool,
    /// Generate past the model's end-of-sequence tokens.
    pub ignore_eos: bool,
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Nucleus mass.
    pub top_p: Option<f32>,
    /// Candidates kept; 0 keeps all.
    pub top_k: Option<u32>,
    /// Least probability relative to the best candidate.
    pub min_p: Option<f32>,
    /// Seed of the random numbers; one is drawn otherwise.
    pub seed: Option<u64>,
    /// Divides the logits of tokens seen.
    pub repetition_penalty: Option<f32>,
    /// Subtracted for each occurrence in the output.
    pub frequency_penalty: Option<f32>,
    /// Subtracted once for a token in the output.
    pub presence_penalty: Option<f32>,
    /// Added to the logit of a token id.
    pub logit_bias: HashMap<u32, f32>,
    /// When not empty, only these tokens may be sampled.
    pub allowed_token_ids: Vec<u32>,
    /// Texts that must not appear.
    pub bad_words: Vec<String>,
    /// What the output must look like.
    pub form: Option<Form>,
    /// Choices to generate; 1 otherwise.
    pub num_choices: Option<u32>,
    /// Alternatives reported with each token; no log-probabilities otherwise.
    pub logprobs: Option<u32>,
    /// Alternatives reported with each prompt token; none otherwise.
    pub prompt_logprobs: Option<u32>,
    /// Add what the tokenizer adds at the beginning; yes otherwise.
    pub add_special_tokens: Option<bool>,
    /// Read control tokens written out in the prompt as such; yes otherwise.
    pub parse_special_tokens: Option<bool>,
    /// Leave control tokens out of the output; yes otherwise.
    pub skip_special_tokens: Option<bool>,
}

impl GenerateOptions {
    pub(crate) fn check(&self) -> Result<(), Error> {
        for (name, value) in [("deadline", self.deadline), ("max_queue_wait", self.max_queue_wait)] {
            if value == Some(Duration::ZERO) {
                return Err(Error::invalid(name, "must be above 0; leave it out for no limit"));
            }
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::invalid("stop", "a stop string has at least one character"));
        }
        Ok(())
    }

    fn sampling(&self) -> v1::SamplingParameters {
        v1::SamplingParameters {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            seed: self.seed,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            logit_bias: self.logit_bias.clone(),
            num_logprobs: self.logprobs,
            num_prompt_logprobs: self.prompt_logprobs,
            num_choices: self.num_choices,
            allowed_token_ids: self.allowed_token_ids.clone(),
            bad_words: self.bad_words.clone(),
            grammar: self.form.clone().map(|form| v1::Grammar {
                kind: Some(kind_of(form)),
            }),
        }
    }

    fn stop_criteria(&self) -> v1::StopCriteria {
        v1::StopCriteria {
            max_output_tokens: self.max_output_tokens,
            strings: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            token_ids: self.stop_token_ids.clone(),
            min_output_tokens: self.min_output_tokens,
            include_stop_string: self.include_stop_string,
        }
    }

    fn text_options(&self) -> v1::TextOptions {
        v1::TextOptions {
            add_special_tokens: self.add_special_tokens,
            parse_special_tokens: self.parse_special_tokens,
            skip_special_tokens: self.skip_special_tokens,
        }
    }
}

fn kind_of(form: Form) -> grammar::Kind {
    match form {
        Form::JsonSchema(schema) => grammar::Kind::JsonSchema(schema),
        Form::JsonObject => grammar::Kind::JsonObject(true),
        Form::Regex(expression) => grammar::Kind::Regex(expression),
        Form::OneOf(texts) => grammar::Kind::Choices(v1::GrammarChoices { texts }),
        Form::Lark(text) => grammar::Kind::Lark(text),
    }
}

/// A request that is ready to be admitted and sent.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) generate: v1::GenerateRequest,
    pub(crate) acquire: v1::AcquireTicketRequest,
}

/// Builds the messages for a text or token ids, without ticket, deadline and resume.
pub(crate) fn prepare(
    prompt: Prompt,
    options: &GenerateOptions,
    model: String,
    tenant: &str,
) -> Result<Prepared, Error> {
    options.check()?;
    let request_id = options
        .request_id
        .clone()
        .filter(|id| !id.is_empty())
        .unwrap_or_else(new_id);
    let mut acquire = v1::AcquireTicketRequest {
        request_id: request_id.clone(),
        model: model.clone(),
        max_output_tokens: options.max_output_tokens.unwrap_or(0),
        num_choices: options.num_choices.unwrap_or(0),
        tenant: tenant.to_owned(),
        max_queue_wait: options.max_queue_wait.map(wire_duration),
        ..Default::default()
    };
    acquire.set_priority(match options.priority {
        Priority::Interactive => v1::Priority::Interactive,
        Priority::Standard => v1::Priority::Standard,
        Priority::Batch => v1::Priority::Batch,
    });
    let size = size_of(&prompt)?;
    (acquire.prompt_bytes, acquire.prompt_digest, acquire.prompt_tokens) = (size.bytes, size.digest, size.tokens);
    let prompt = match prompt {
        Prompt::Text(text) => generate_request::Prompt::Text(text),
        Prompt::Tokens(ids) => generate_request::Prompt::TokenIds(v1::TokenIds { ids }),
        Prompt::Conversation(_) => unreachable!("a conversation is refused by size_of"),
    };
    let generate = v1::GenerateRequest {
        request_id,
        model,
        prompt: Some(prompt),
        sampling: Some(options.sampling()),
        stop: Some(options.stop_criteria()),
        text_options: Some(options.text_options()),
        cache_salt: options.cache_salt.clone(),
        ..Default::default()
    };
    Ok(Prepared { generate, acquire })
}

/// What a controller is told of a prompt: never the prompt itself.
pub(crate) struct Size {
    pub(crate) bytes: u64,
    pub(crate) digest: Vec<u8>,
    pub(crate) tokens: Option<u32>,
}

/// The size of a text or of token ids.
pub(crate) fn size_of(prompt: &Prompt) -> Result<Size, Error> {
    match prompt {
        // 0 bytes would read as a size that was not given.
        Prompt::Text(text) if text.is_empty() => Err(Error::invalid(
            "prompt",
            "the text is empty; give at least one character",
        )),
        Prompt::Text(text) => Ok(Size {
            bytes: text.len() as u64,
            digest: digest_of_text(text),
            tokens: None,
        }),
        Prompt::Tokens(ids) if ids.is_empty() => Err(Error::invalid(
            "prompt",
            "the list of token ids is empty; give at least one",
        )),
        Prompt::Tokens(ids) => Ok(Size {
            bytes: 4 * ids.len() as u64,
            digest: digest_of_tokens(ids),
            tokens: Some(u32::try_from(ids.len()).unwrap_or(u32::MAX)),
        }),
        Prompt::Conversation(_) => Err(Error::invalid(
            "prompt",
            "is a conversation; this call takes a text or token ids",
        )),
    }
}

pub(crate) fn messages_of(conversation: Vec<Message>) -> Result<Vec<v1::ChatMessage>, Error> {
    if conversation.is_empty() {
        return Err(Error::invalid(
            "messages",
            "the conversation is empty; give at least one message",
        ));
    }
    Ok(conversation
        .into_iter()
        .map(|message| v1::ChatMessage {
            role: message.role,
            content: message.content,
        })
        .collect())
}

/// A random UUID (RFC 9562, version 4).
pub(crate) fn new_id() -> String {
    let bits = u128::from_be_bytes(random_bytes());
    let bits = bits & !(0xF << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
    format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        bits >> 96,
        bits >> 80 & 0xFFFF,
        bits >> 64 & 0xFFFF,
        bits >> 48 & 0xFFFF,
        bits & 0xFFFF_FFFF_FFFF
    )
}

/// A random seed of 63 bits.
pub(crate) fn new_seed() -> u64 {
    u64::from_le_bytes(random_bytes()) >> 1
}

/// A random factor from 0.5 to 1.
pub(crate) fn new_jitter() -> f64 {
    0.5 + 0.5 * f64::from(u32::from_le_bytes(random_bytes())) / f64::from(u32::MAX)
}

fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    SystemRandom::new()
        .fill(&mut bytes)
        .expect("the operating system gives random numbers");
    bytes
}

#[cfg(test)]
mod tests;
