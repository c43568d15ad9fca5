//! Embeddings: one ticket and one call for all inputs.

use std::time::{Duration, Instant};

use crate::channels::{Address, stub};
use crate::client::Inner;
use crate::errors::Error;
use crate::request::{Prompt, new_id, size_of};
use crate::results::Embeddings;
use crate::ticket::{QUEUE_TIMEOUT, ask_agent, digest_of_inputs, timed};
use crate::v1::embed_input::Input;
use crate::v1::embedding_service_client::EmbeddingServiceClient;
use crate::v1::{AcquireTicketRequest, EmbedInput, EmbedRequest, TokenIds};

/// Options of `Client::embed`.
#[derive(Clone, Debug, Default)]
pub struct EmbedOptions {
    /// May be left out where one model is served.
    pub model: Option<String>,
    /// Cuts the vectors and normalises them again; the model's width otherwise.
    pub dimensions: Option<u32>,
    /// The model's own prompt that goes before each text, such as "query"; the files' default otherwise.
    pub prompt_name: Option<String>,
    /// The task of the queries that the texts are, in the form that the model was trained with; not with `prompt_name`.
    pub instruction: Option<String>,
    /// Bounds the wait in the queue and the call.
    pub deadline: Option<Duration>,
}

impl Inner {
    pub(crate) async fn embed(&self, inputs: Vec<Prompt>, options: EmbedOptions) -> Result<Embeddings, Error> {
        if inputs.is_empty() {
            return Err(Error::invalid("inputs", "is empty; give at least one text"));
        }
        if options.deadline == Some(Duration::ZERO) {
            return Err(Error::invalid("deadline", "must be above 0; leave it out for no limit"));
        }
        let until = Instant::now() + options.deadline.unwrap_or(QUEUE_TIMEOUT);
        let sizes = inputs.iter().map(size_of).collect::<Result<Vec<_>, _>>()?;
        let model = self.resolve(options.model.as_deref()).await?;
        let acquire = AcquireTicketRequest {
            request_id: new_id(),
            model: model.clone(),
            max_output_tokens: 1,
            prompt_bytes: sizes.iter().map(|size| size.bytes).sum(),
            prompt_digest: digest_of_inputs(&sizes.into_iter().map(|size| size.digest).collect::<Vec<_>>()),
            num_inputs: u32::try_from(inputs.len()).unwrap_or(u32::MAX),
            tenant: self.tenant.clone(),
            ..Default::default()
        };
        let grant = self
            .admission
            .acquire(&self.channels, &self.cell, &acquire, left(until)?)
            .await?;
        let ticket = &grant.tickets[0];
        let request = EmbedRequest {
            request_id: acquire.request_id,
            ticket_token: ticket.token.clone(),
            model,
            inputs: inputs.into_iter().map(input_of).collect(),
            dimensions: options.dimensions,
            prompt_name: options.prompt_name,
            instruction: options.instruction,
        };
        let (address, timeout) = (Address::new(&ticket.data_address, &ticket.agent_id), left(until)?);
        let answer = ask_agent(&self.channels, &address, timeout, |channel| {
            let request = timed(request.clone(), timeout);
            async move { stub!(EmbeddingServiceClient, channel).embed(request).await }
        })
        .await?;
        let vectors = answer.embeddings.into_iter().map(|vector| vector.values).collect();
        Ok(Embeddings {
            vectors,
            prompt_tokens: answer.prompt_tokens,
        })
    }
}

fn input_of(prompt: Prompt) -> EmbedInput {
    let input = match prompt {
        Prompt::Text(text) => Input::Text(text),
        Prompt::Tokens(ids) => Input::TokenIds(TokenIds { ids }),
        Prompt::Conversation(_) => unreachable!("a conversation is refused by size_of"),
    };
    EmbedInput { input: Some(input) }
}

fn left(until: Instant) -> Result<Duration, Error> {
    match until.checked_duration_since(Instant::now()) {
        Some(left) if !left.is_zero() => Ok(left),
        _ => Err(Error::deadline_passed()),
    }
}
