//! One generation as the client follows it: admission, an agent's stream, fallback, resume at the last cursor, one end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::attempt::{Attempt, Next};
use crate::client::Inner;
use crate::errors::{Error, duration_of, wire_duration};
use crate::progress::Progress;
use crate::request::{GenerateOptions, Prepared, Prompt, new_jitter, new_seed};
use crate::results::{AgentTimings, GenerationResult, Timings, Token, Usage, logprobs_of, quote_of};
use crate::retry::{Pursuit, Step, may_pass};
use crate::stream::Shared;
use crate::ticket::{QUEUE_TIMEOUT, Unused};
use crate::v1::{AcquireTicketRequest, GenerateRequest, GenerationFinished, GenerationStarted, ResumeRequest, Ticket};

/// Owner of the state of one generation.
pub(crate) struct Generation {
    client: Arc<Inner>,
    shared: Arc<Shared>,
    began: Instant,
    deadline: Option<Instant>,
    /// Taken when the request is made.
    prompt: Option<Prompt>,
    options: GenerateOptions,
    request: Option<Prepared>,
    progress: Progress,
    pursuit: Pursuit,
    attempt: Option<Attempt>,
    /// The ticket that was tried last.
    ticket: Option<Ticket>,
    /// Where the stream was cut.
    origin: Option<Ticket>,
    first_started: Option<GenerationStarted>,
    seed: Option<u64>,
    finished: Option<GenerationFinished>,
    first_token: Option<Instant>,
}

impl Generation {
    pub(crate) fn new(
        client: Arc<Inner>,
        shared: Arc<Shared>,
        prompt: Prompt,
        options: GenerateOptions,
        began: Instant,
    ) -> Self {
        let deadline = options.deadline.map(|deadline| began + deadline);
        let pursuit = Pursuit::new(client.retry.clone(), deadline);
        Self {
            client,
            shared,
            began,
            deadline,
            prompt: Some(prompt),
            options,
            request: None,
            progress: Progress::new(1),
            pursuit,
            attempt: None,
            ticket: None,
            origin: None,
            first_started: None,
            seed: None,
            finished: None,
            first_token: None,
        }
    }

    /// Gives every item, and returns the whole.
    pub(crate) async fn follow(mut self) -> Result<GenerationResult, Error> {
        self.options.check()?;
        while self.finished.is_none() && !self.progress.complete() {
            match self.advance().await {
                Ok(Some(token)) => self.shared.give(token).await,
                Ok(None) => {}
                Err(error) => {
                    let accepted = self.attempt.take().is_some();
                    self.recover(error, accepted).await?;
                }
            }
        }
        self.read_end().await;
        Ok(self.into_result())
    }

    /// Takes one event, after having the request accepted where it is not.
    async fn advance(&mut self) -> Result<Option<Token>, Error> {
        if self.attempt.is_none() {
            let (attempt, started) = self.start().await?;
            self.attempt = Some(attempt);
            self.seed = Some(started.seed);
            self.first_started.get_or_insert(started);
            self.pursuit.started();
            self.client.budget.succeeded();
        }
        let Some(attempt) = &mut self.attempt else {
            return Ok(None);
        };
        match attempt.read().await? {
            Next::Finished(_) if !self.progress.complete() => {
                Err(attempt.lost("finished the request before all its choices had ended"))
            }
            Next::Finished(finished) => {
                self.finished = Some(finished);
                Ok(None)
            }
            Next::Delta(delta) => {
                let token = self
                    .progress
                    .take(delta)
                    .map_err(|misfit| attempt.lost(&format!("sent a frame that does not fit: {misfit}")))?;
                if token.is_some() {
                    self.first_token.get_or_insert_with(Instant::now);
                    self.pursuit.flowed();
                }
                Ok(token)
            }
        }
    }

    /// Has the request admitted and accepted: by the first agent, or by the second where the first refuses.
    async fn start(&mut self) -> Result<(Attempt, GenerationStarted), Error> {
        if let Some(prompt) = self.prompt.take() {
            let request = within(self.remaining()?, self.client.prepare(prompt.clone(), &self.options)).await;
            // A request that could not be made yet is made when it is tried again.
            let request = request.inspect_err(|_| self.prompt = Some(prompt))?;
            self.progress = Progress::new(request.acquire.num_choices);
            self.shared.view().request_id = Some(request.generate.request_id.clone());
            self.request = Some(request);
        }
        let client = Arc::clone(&self.client);
        let timeout = self.remaining()?.unwrap_or(QUEUE_TIMEOUT);
        let acquire = self.acquire_message()?;
        let grant = client
            .admission
            .acquire(&client.channels, &client.cell, &acquire, timeout);
        let grant = within(self.remaining()?, grant).await?;
        if let Some(quote) = grant.quote {
            self.shared
                .view()
                .quote
                .get_or_insert_with(|| quote_of(quote, grant.tickets[0].agent_id.clone()));
        }
        let request = self.generate_message();
        let mut first: Option<Error> = None;
        for ticket in &grant.tickets {
            self.placed(ticket);
            let mut unused = Unused {
                admission: &client.admission,
                channels: &client.channels,
                cell: &client.cell,
                ticket,
                runtime: Handle::current(),
                used: false,
            };
            self.remaining()?;
            match Attempt::open(&client.channels, ticket, request.clone(), self.deadline).await {
                Ok(accepted) => {
                    unused.used = true;
                    return Ok(accepted);
                }
                Err(error) if may_pass(&error, self.origin.is_some()) => {
                    first.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(first.unwrap_or_else(Error::deadline_passed))
    }

    fn placed(&mut self, ticket: &Ticket) {
        self.ticket = Some(ticket.clone());
        self.shared.view().agent = Some((ticket.agent_id.clone(), ticket.data_address.clone()));
    }

    fn acquire_message(&self) -> Result<AcquireTicketRequest, Error> {
        let mut message = self.request().acquire.clone();
        message.deadline = self.remaining()?.map(wire_duration);
        message.resume = self.origin.as_ref().map(|origin| ResumeRequest {
            origin_epoch: origin.epoch,
            origin_agent_id: origin.agent_id.clone(),
            attempt: self.pursuit.num_resumes,
            from_cursor: self.progress.num_tokens(),
        });
        Ok(message)
    }

    fn generate_message(&mut self) -> GenerateRequest {
        let mut message = self.request().generate.clone();
        if let Some(origin) = &self.origin {
            // Where it was lost before the agent named the seed it drew, nothing was delivered: any will do.
            let seed = *self
                .seed
                .get_or_insert_with(|| self.options.seed.unwrap_or_else(new_seed));
            message.resume = Some(self.progress.resume_state(self.pursuit.num_resumes, origin.epoch, seed));
        }
        message
    }

    fn request(&self) -> &Prepared {
        self.request.as_ref().expect("it is made before anything is sent")
    }

    /// Waits until the request may be tried again, or fails with what ends the stream.
    async fn recover(&mut self, error: Error, accepted: bool) -> Result<(), Error> {
        let cut = self.pursuit.cut().cloned();
        let decision = self
            .pursuit
            .failed(&error, accepted, self.ticket.is_some(), Instant::now(), new_jitter());
        let Some((step, delay)) = decision.filter(|_| self.client.budget.spend()) else {
            return Err(not_resumed(cut, error));
        };
        if step == Step::Resume {
            self.origin.clone_from(&self.ticket);
            self.shared.view().num_resumes = self.pursuit.num_resumes;
        }
        tokio::time::sleep(delay).await;
        Ok(())
    }

    /// What is left until the deadline; `None` where there is none.
    fn remaining(&self) -> Result<Option<Duration>, Error> {
        let Some(deadline) = self.deadline else { return Ok(None) };
        match deadline.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => Ok(Some(left)),
            _ => Err(Error::deadline_passed()),
        }
    }

    /// Reads the usage after the last token. All tokens are here, so an agent lost now costs only its figures.
    async fn read_end(&mut self) {
        if let (Some(attempt), None) = (&mut self.attempt, &self.finished)
            && let Ok(Next::Finished(finished)) = attempt.read().await
        {
            self.finished = Some(finished);
        }
        self.attempt = None;
    }

    fn into_result(self) -> GenerationResult {
        let (Prepared { generate, .. }, started) = (
            self.request.expect("it was sent"),
            self.first_started.unwrap_or_default(),
        );
        let finished = self.finished.unwrap_or_default();
        let usage = finished.usage.unwrap_or_default();
        let agent = finished.total_time.map(|total| AgentTimings {
            queue: finished.queue_time.map(duration_of).unwrap_or_default(),
            time_to_first_token: finished.time_to_first_token.map(duration_of).unwrap_or_default(),
            total: duration_of(total),
        });
        GenerationResult {
            request_id: generate.request_id,
            model: generate.model,
            usage: Usage {
                prompt_tokens: started.prompt_tokens,
                cached_tokens: usage.cached_tokens,
                // Counted here: an agent that took over counts only from its own start.
                output_tokens: self.progress.num_tokens(),
            },
            choices: self.progress.into_choices(),
            timings: Timings {
                time_to_first_token: self.first_token.map(|at| at - self.began),
                total: self.began.elapsed(),
                agent,
            },
            seed: self.seed.unwrap_or_default(),
            agent_id: self.ticket.unwrap_or_default().agent_id,
            num_resumes: self.pursuit.num_resumes,
            quote: self.shared.view().quote.clone(),
            prompt_logprobs: logprobs_of(started.prompt_logprobs),
        }
    }
}

/// The end of a stream: when it had been cut, what cut it comes first.
fn not_resumed(cut: Option<Error>, error: Error) -> Error {
    let Some(cut) = cut else { return error };
    let message = format!(
        "the stream was cut ({}) and could not be resumed: {}",
        cut.message, error.message
    );
    Error { message, ..error }
}

async fn within<R>(limit: Option<Duration>, call: impl Future<Output = Result<R, Error>>) -> Result<R, Error> {
    match limit {
        Some(limit) => tokio::time::timeout(limit, call)
            .await
            .unwrap_or_else(|_| Err(Error::deadline_passed())),
        None => call.await,
    }
}
