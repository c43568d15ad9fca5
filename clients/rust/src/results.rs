//! What a client gets back: tokens while they come, results when they are complete.

use std::fmt;
use std::time::Duration;

use crate::errors::duration_of;
use crate::v1;

/// Log-probability of one token: natural logarithm, finite.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token_id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The token's own bytes.
    pub token_bytes: Vec<u8>,
    /// The best alternatives, best first; empty in an alternative.
    pub top: Vec<TokenLogprob>,
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FinishReason {
    /// A stop token or string, or a reason that this version does not know.
    Stop,
    /// The token budget or the end of the context.
    Length,
    /// The request was cancelled.
    Cancelled,
}

impl FinishReason {
    /// Such as "stop".
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// New tokens of one choice; one item of a stream.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Token {
    /// What became certain with them; may be empty while a character or a stop string is incomplete.
    pub text: String,
    /// The ids; may be several, or none with the end of a choice.
    pub token_ids: Vec<u32>,
    /// Position of the first of them in the output of the choice.
    pub cursor: u64,
    /// The choice.
    pub choice: u32,
    /// One a token, where asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// Set with the last tokens of the choice.
    pub finish_reason: Option<FinishReason>,
}

/// One complete output.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Choice {
    /// The text.
    pub text: String,
    /// The ids.
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// The stop string that ended it.
    pub stop_string: Option<String>,
    /// The token that ended it.
    pub stop_token_id: Option<u32>,
    /// One a token, where asked for.
    pub logprobs: Vec<TokenLogprob>,
}

/// Tokens used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Tokens generated, over all choices.
    pub output_tokens: u64,
}

/// The finishing agent's own times, from acceptance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AgentTimings {
    /// To the first step that computed for the request.
    pub queue: Duration,
    /// To the first token.
    pub time_to_first_token: Duration,
    /// To the end.
    pub total: Duration,
}

/// Times as the client saw them, from its call on, with admission and resumes in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timings {
    /// To the first token; `None` where there was none.
    pub time_to_first_token: Option<Duration>,
    /// To the end.
    pub total: Duration,
    /// What the agent said, where it did.
    pub agent: Option<AgentTimings>,
}

/// A complete generation.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct GenerationResult {
    /// Id of the request.
    pub request_id: String,
    /// The model.
    pub model: String,
    /// The outputs; at least one.
    pub choices: Vec<Choice>,
    /// Tokens used.
    pub usage: Usage,
    /// How long it took.
    pub timings: Timings,
    /// The seed it ran with.
    pub seed: u64,
    /// The agent that finished it; empty for an open agent.
    pub agent_id: String,
    /// How often it was continued after a cut.
    pub num_resumes: u32,
    /// What the controller promised; `None` for an open agent.
    pub quote: Option<Quote>,
    /// Of the prompt's tokens from the second on, where asked for.
    pub prompt_logprobs: Vec<TokenLogprob>,
}

impl GenerationResult {
    /// Text of the first choice.
    pub fn text(&self) -> &str {
        self.choices.first().map_or("", |choice| &choice.text)
    }
}

/// One prediction: the middle, and the interval that holds eight in ten outcomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Estimate {
    /// The middle.
    pub expected: Duration,
    /// One in ten is below.
    pub p10: Duration,
    /// One in ten is above.
    pub p90: Duration,
}

/// What the controller predicts for a request, and the agent it would go to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quote {
    /// From acceptance at the agent to the first token.
    pub time_to_first_token: Estimate,
    /// Between two tokens.
    pub time_per_output_token: Estimate,
    /// From acceptance at the agent to the last token.
    pub finish: Estimate,
    /// The agent.
    pub agent_id: String,
}

/// One vector of Euclidean norm 1 an input, in order.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Embeddings {
    /// The vectors.
    pub vectors: Vec<Vec<f32>>,
    /// Tokens over all inputs.
    pub prompt_tokens: u32,
}

/// The name of a finish reason; a number this version does not know reads as a stop.
pub(crate) fn finish_reason_of(number: i32) -> FinishReason {
    match v1::FinishReason::try_from(number) {
        Ok(v1::FinishReason::Length) => FinishReason::Length,
        Ok(v1::FinishReason::Cancelled) => FinishReason::Cancelled,
        _ => FinishReason::Stop,
    }
}

pub(crate) fn logprobs_of(entries: Vec<v1::TokenLogprob>) -> Vec<TokenLogprob> {
    let one = |entry: v1::TokenLogprob| TokenLogprob {
        token_id: entry.token_id,
        logprob: entry.logprob,
        token_bytes: entry.token_bytes,
        top: entry
            .top
            .into_iter()
            .map(|other| TokenLogprob {
                token_id: other.token_id,
                logprob: other.logprob,
                token_bytes: other.token_bytes,
                top: Vec::new(),
            })
            .collect(),
    };
    entries.into_iter().map(one).collect()
}

pub(crate) fn quote_of(quote: v1::LatencyQuote, agent_id: String) -> Quote {
    Quote {
        time_to_first_token: estimate_of(quote.time_to_first_token),
        time_per_output_token: estimate_of(quote.time_per_output_token),
        finish: estimate_of(quote.finish),
        agent_id,
    }
}

fn estimate_of(estimate: Option<v1::LatencyEstimate>) -> Estimate {
    let given = estimate.unwrap_or_default();
    let duration = |duration: Option<prost_types::Duration>| duration.map(duration_of).unwrap_or_default();
    Estimate {
        expected: duration(given.expected),
        p10: duration(given.p10),
        p90: duration(given.p90),
    }
}
