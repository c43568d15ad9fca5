//! The client: generation with resume, embeddings, tokenizing, and what controller and agents tell of themselves.

use std::env;
use std::fmt;
use std::sync::Arc;

use tonic::transport::ClientTlsConfig;

use crate::catalogue::Reason;
use crate::channels::{Address, Channels, stub};
use crate::controllers::Controllers;
use crate::directory::Directory;
use crate::embed::EmbedOptions;
use crate::errors::Error;
use crate::request::{GenerateOptions, Prepared, Prompt, messages_of, prepare, size_of};
use crate::results::{Embeddings, GenerationResult, Quote, quote_of};
use crate::retry::{RetryBudget, RetryPolicy};
use crate::stream::GenerationStream;
use crate::ticket::{Admission, CALL_TIMEOUT, Cell, ask_agent, ask_controller, timed};
use crate::v1::admission_service_client::AdmissionServiceClient;
use crate::v1::generation_service_client::GenerationServiceClient;
use crate::v1::hardware_service_client::HardwareServiceClient;
use crate::v1::tokenizer_service_client::TokenizerServiceClient;
use crate::v1::{self, AgentLoadSample, FleetMember, GetHardwareRequest, GetHardwareResponse};

/// Where a client looks for a controller when neither `Config` nor `$DRAGOMAN_CONTROLLER` names one.
pub const DEFAULT_CONTROLLER: &str = "127.0.0.1:50050";

const CONTROLLER_VARIABLE: &str = "DRAGOMAN_CONTROLLER";

/// Whom a client talks to. The default is a controller at `$DRAGOMAN_CONTROLLER`, else at `DEFAULT_CONTROLLER`.
#[derive(Clone, Default)]
pub struct Config {
    /// host:port; several controllers of one cell are listed with commas, and another is asked when one is away.
    pub controller: Option<String>,
    /// host:port of one agent that was started with --open; there is no controller then.
    pub agent: Option<String>,
    /// Charged for the requests; empty is the default tenant.
    pub tenant: String,
    /// Encrypts connections; an agent's certificate must name its id. `None` is for loopback only.
    pub tls: Option<ClientTlsConfig>,
    /// How hard to try.
    pub retry: RetryPolicy,
}

impl fmt::Debug for Config {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the key.
        formatter
            .debug_struct("Config")
            .field("controller", &self.controller)
            .field("agent", &self.agent)
            .field("tenant", &self.tenant)
            .field("tls", &self.tls.is_some())
            .field("retry", &self.retry)
            .finish()
    }
}

/// Options of `Client::tokenize`; `None` is the agent's default.
#[derive(Clone, Debug, Default)]
pub struct TokenizeOptions {
    /// May be left out where one model is served.
    pub model: Option<String>,
    /// Add what the tokenizer adds at the beginning.
    pub add_special_tokens: Option<bool>,
    /// Read control tokens written out in the text as such.
    pub parse_special_tokens: Option<bool>,
}

/// Options of `Client::detokenize`; `None` is the agent's default.
#[derive(Clone, Debug, Default)]
pub struct DetokenizeOptions {
    /// May be left out where one model is served.
    pub model: Option<String>,
    /// Leave control tokens out.
    pub skip_special_tokens: Option<bool>,
}

/// Talks to a controller and its agents, within a tokio runtime. Cheap to clone; clones share connections and budget.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

/// What a client shares with its streams.
pub(crate) struct Inner {
    pub(crate) tenant: String,
    pub(crate) retry: RetryPolicy,
    pub(crate) budget: RetryBudget,
    pub(crate) channels: Channels,
    pub(crate) cell: Cell,
    pub(crate) admission: Admission,
    directory: Directory,
}

impl Client {
    /// A client; nothing is dialled before the first call.
    pub fn new(config: Config) -> Result<Self, Error> {
        config.retry.check()?;
        let cell = match (config.controller, config.agent) {
            (Some(_), Some(_)) => {
                let message = "controller and agent are both given; an open agent has no controller";
                return Err(Error::invalid("agent", message));
            }
            (None, Some(agent)) if agent.trim().is_empty() => {
                return Err(Error::invalid("agent", "the address is empty; give host:port"));
            }
            (None, Some(agent)) => Cell::OpenAgent(Address::new(agent.trim(), "")),
            (Some(controller), None) => Cell::Controllers(Controllers::new(&controller)?),
            (None, None) => {
                let named = env::var(CONTROLLER_VARIABLE).ok().filter(|named| !named.is_empty());
                Cell::Controllers(Controllers::new(named.as_deref().unwrap_or(DEFAULT_CONTROLLER))?)
            }
        };
        Ok(Self {
            inner: Arc::new(Inner {
                tenant: config.tenant,
                budget: RetryBudget::new(config.retry.budget),
                retry: config.retry,
                channels: Channels::new(config.tls),
                cell,
                admission: Admission::default(),
                directory: Directory::default(),
            }),
        })
    }

    /// Ends all calls and streams of this client and its clones with CANCELLED, and closes their connections.
    pub async fn close(&self) {
        self.inner.admission.close().await;
        self.inner.channels.close();
    }

    /// Generates after a text, token ids, or a conversation; returns a stream that sends nothing until it is polled.
    pub fn generate(&self, prompt: impl Into<Prompt>, options: GenerateOptions) -> GenerationStream {
        GenerationStream::new(Arc::clone(&self.inner), prompt.into(), options)
    }

    /// As `generate`, the whole result at once.
    pub async fn complete(
        &self,
        prompt: impl Into<Prompt>,
        options: GenerateOptions,
    ) -> Result<GenerationResult, Error> {
        self.generate(prompt, options).result().await
    }

    /// One vector an input (a text or token ids), in order.
    pub async fn embed<P: Into<Prompt>>(
        &self,
        inputs: impl IntoIterator<Item = P>,
        options: EmbedOptions,
    ) -> Result<Embeddings, Error> {
        let inputs = inputs.into_iter().map(Into::into).collect();
        self.inner.embed(inputs, options).await
    }

    /// The token ids of a text.
    pub async fn tokenize(&self, text: impl Into<String>, options: TokenizeOptions) -> Result<Vec<u32>, Error> {
        let inner = &self.inner;
        let model = inner.resolve(options.model.as_deref()).await?;
        let address = inner.directory.agent_of(&inner.channels, &inner.cell, &model).await?;
        let request = v1::TokenizeRequest {
            model,
            text: text.into(),
            add_special_tokens: options.add_special_tokens,
            parse_special_tokens: options.parse_special_tokens,
        };
        let answer = ask_agent(&inner.channels, &address, CALL_TIMEOUT, |channel| {
            let request = timed(request.clone(), CALL_TIMEOUT);
            async move { stub!(TokenizerServiceClient, channel).tokenize(request).await }
        })
        .await?;
        Ok(answer.token_ids.unwrap_or_default().ids)
    }

    /// The text of token ids; bytes that form no character appear as U+FFFD.
    pub async fn detokenize(&self, token_ids: Vec<u32>, options: DetokenizeOptions) -> Result<String, Error> {
        let inner = &self.inner;
        let model = inner.resolve(options.model.as_deref()).await?;
        let address = inner.directory.agent_of(&inner.channels, &inner.cell, &model).await?;
        let request = v1::DetokenizeRequest {
            model,
            token_ids: Some(v1::TokenIds { ids: token_ids }),
            skip_special_tokens: options.skip_special_tokens,
        };
        let answer = ask_agent(&inner.channels, &address, CALL_TIMEOUT, |channel| {
            let request = timed(request.clone(), CALL_TIMEOUT);
            async move { stub!(TokenizerServiceClient, channel).detokenize(request).await }
        })
        .await?;
        Ok(answer.text)
    }

    /// Cancels a request that was started anywhere. One that is unknown or has ended is no error.
    ///
    /// A stream of one's own is cancelled more directly by dropping it.
    pub async fn cancel(&self, request_id: impl Into<String>) -> Result<(), Error> {
        let inner = &self.inner;
        let request = v1::CancelGenerationRequest {
            request_id: request_id.into(),
        };
        for address in inner.directory.addresses(&inner.channels, &inner.cell).await? {
            let cancelled = ask_agent(&inner.channels, &address, CALL_TIMEOUT, |channel| {
                let request = timed(request.clone(), CALL_TIMEOUT);
                async move { stub!(GenerationServiceClient, channel).cancel_generation(request).await }
            });
            match cancelled.await {
                // A dead agent runs nothing.
                Err(error) if error.reason != Reason::NoAgent => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// What the request would cost now, and where it would go. Grants nothing.
    pub async fn quote(&self, prompt: impl Into<Prompt>, options: GenerateOptions) -> Result<Quote, Error> {
        let inner = &self.inner;
        let Cell::Controllers(controllers) = &inner.cell else {
            let message = "a quote comes from a controller, and this client has an agent only";
            return Err(Error::invalid("controller", message));
        };
        let acquire = inner.prepare(prompt.into(), &options).await?.acquire;
        let answer = ask_controller(&inner.channels, controllers, CALL_TIMEOUT, |channel| {
            let request = timed(
                v1::QuoteRequest {
                    request: Some(acquire.clone()),
                },
                CALL_TIMEOUT,
            );
            async move { stub!(AdmissionServiceClient, channel).quote(request).await }
        })
        .await?;
        Ok(quote_of(answer.quote.unwrap_or_default(), answer.agent_id))
    }

    /// Names of the served models.
    pub async fn models(&self) -> Result<Vec<String>, Error> {
        self.inner
            .directory
            .models(&self.inner.channels, &self.inner.cell)
            .await
    }

    /// Every agent with its state and load, as the controller sees it.
    pub async fn agents(&self) -> Result<Vec<FleetMember>, Error> {
        self.inner
            .directory
            .members(&self.inner.channels, &self.inner.cell)
            .await
    }

    /// Measured profile of an agent's device, and every device that was looked at with the reason. `None` is the only agent there
    /// is.
    pub async fn hardware(&self, agent_id: Option<&str>) -> Result<GetHardwareResponse, Error> {
        let inner = &self.inner;
        let address = inner
            .directory
            .agent_by_id(&inner.channels, &inner.cell, agent_id)
            .await?;
        ask_agent(&inner.channels, &address, CALL_TIMEOUT, |channel| async move {
            stub!(HardwareServiceClient, channel)
                .get_hardware(timed(GetHardwareRequest {}, CALL_TIMEOUT))
                .await
        })
        .await
    }

    /// Load of each agent now: running and waiting requests, free KV blocks, step time.
    pub async fn load(&self) -> Result<Vec<AgentLoadSample>, Error> {
        self.inner.directory.load(&self.inner.channels, &self.inner.cell).await
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Client")
            .field("cell", &self.inner.cell)
            .finish_non_exhaustive()
    }
}

impl Inner {
    /// Resolves the model, renders a conversation, and builds the messages.
    pub(crate) async fn prepare(&self, prompt: Prompt, options: &GenerateOptions) -> Result<Prepared, Error> {
        options.check()?;
        let (prompt, conversation) = match prompt {
            Prompt::Conversation(messages) => (None, messages_of(messages)?),
            prompt => {
                size_of(&prompt)?;
                (Some(prompt), Vec::new())
            }
        };
        let model = self.resolve(options.model.as_deref()).await?;
        let prompt = match prompt {
            Some(prompt) => prompt,
            None => Prompt::Tokens(self.render(&model, conversation).await?),
        };
        prepare(prompt, options, model, &self.tenant)
    }

    pub(crate) async fn resolve(&self, model: Option<&str>) -> Result<String, Error> {
        self.directory.resolve(&self.channels, &self.cell, model).await
    }

    async fn render(&self, model: &str, messages: Vec<v1::ChatMessage>) -> Result<Vec<u32>, Error> {
        let address = self.directory.agent_of(&self.channels, &self.cell, model).await?;
        let request = v1::ApplyTemplateRequest {
            model: model.to_owned(),
            messages,
            ..Default::default()
        };
        let rendered = ask_agent(&self.channels, &address, CALL_TIMEOUT, |channel| {
            let request = timed(request.clone(), CALL_TIMEOUT);
            async move { stub!(TokenizerServiceClient, channel).apply_template(request).await }
        })
        .await?;
        Ok(rendered.token_ids.unwrap_or_default().ids)
    }
}

#[cfg(test)]
mod tests;
