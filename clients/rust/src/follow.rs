//! One generation as the client follows it: admission, an agent's stream, fallback, resume at the last cursor, one end.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::attempt::{Attempt, Next};
use crate::client::Inner;
use crate::errors::{Error, duration_of, wire_duration};
use crate::progress::Progress;
use crate::request::{GenerateOptions, Prepared, Prompt, new_jitter, new_seed};
use crate::results::{AgentTimings, GenerationResult, Quote, Timings, Token, Usage, logprobs_of, quote_of};
use crate::retry::{Pursuit, Step, may_pass};
use crate::ticket::{QUEUE_TIMEOUT, Unused};
use crate::v1::{AcquireTicketRequest, GenerateRequest, GenerationFinished, GenerationStarted, ResumeRequest, Ticket};

/// What is known of a generation, for whoever holds its stream. Written by the generation alone.
#[derive(Debug, Default)]
pub(crate) struct View {
    pub(crate) request_id: Option<String>,
    /// Id and data address.
    pub(crate) agent: Option<(String, String)>,
    pub(crate) num_resumes: u32,
    pub(crate) quote: Option<Quote>,
}

/// Owner of the state of one generation. What a token does not need is boxed, so that the state it needs is on few cache lines.
pub(crate) struct Generation {
    client: Arc<Inner>,
    view: Arc<Mutex<View>>,
    began: Instant,
    deadline: Option<Instant>,
    /// Taken when the request is made.
    prompt: Option<Prompt>,
    options: Box<GenerateOptions>,
    request: Option<Box<Prepared>>,
    progress: Progress,
    pursuit: Pursuit,
    attempt: Option<Attempt>,
    /// The ticket that was tried last.
    ticket: Option<Box<Ticket>>,
    /// Where the stream was cut.
    origin: Option<Box<Ticket>>,
    first_started: Option<Box<GenerationStarted>>,
    seed: Option<u64>,
    finished: Option<Box<GenerationFinished>>,
    first_token: Option<Instant>,
}

impl Generation {
    pub(crate) fn new(
        client: Arc<Inner>,
        view: Arc<Mutex<View>>,
        prompt: Prompt,
        options: GenerateOptions,
        began: Instant,
    ) -> Self {
        let deadline = options.deadline.map(|deadline| began + deadline);
        let pursuit = Pursuit::new(client.retry.clone(), deadline);
        Self {
            client,
            view,
            began,
            deadline,
            prompt: Some(prompt),
            options: Box::new(options),
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

    /// Has the request accepted: for the first time, or again after a failure. Fails with what ends the stream.
    pub(crate) async fn open(mut self: Box<Self>, mut failure: Option<Error>) -> Result<Box<Self>, Error> {
        self.options.check()?;
        loop {
            if let Some(failure) = failure {
                self.recover(failure).await?;
            }
            match self.start().await {
                Ok(()) => return Ok(self),
                Err(error) => failure = Some(error),
            }
        }
    }

    /// The next item; `None` when there are no more. To be called when it is open; to be opened again where it fails.
    pub(crate) fn poll_token(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Token>, Error>> {
        loop {
            if self.finished.is_some() || self.progress.complete() {
                return Poll::Ready(Ok(None));
            }
            let event = ready!(self.attempt().poll_next(context))?;
            if let Some(token) = self.take(event)? {
                return Poll::Ready(Ok(Some(token)));
            }
        }
    }

    /// The whole, once there are no more items.
    ///
    /// Reads the usage after the last token. All tokens are here, so an agent lost now costs only its figures.
    pub(crate) async fn finish(mut self: Box<Self>) -> GenerationResult {
        if self.finished.is_none() {
            let event = poll_fn(|context| self.attempt().poll_next(context)).await;
            if let Ok(Next::Finished(finished)) = event {
                self.finished = Some(Box::new(finished));
            }
        }
        self.attempt = None;
        self.into_result()
    }

    fn attempt(&mut self) -> &mut Attempt {
        self.attempt.as_mut().expect("a generation is read while it is open")
    }

    /// Takes one event of the attempt. Fails when the agent is lost with it.
    fn take(&mut self, event: Next) -> Result<Option<Token>, Error> {
        let attempt = self.attempt.as_ref().expect("a generation is read while it is open");
        match event {
            Next::Finished(_) if !self.progress.complete() => {
                Err(attempt.lost("finished the request before all its choices had ended"))
            }
            Next::Finished(finished) => {
                self.finished = Some(Box::new(finished));
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
    async fn start(&mut self) -> Result<(), Error> {
        if let Some(prompt) = self.prompt.take() {
            let request = within(self.remaining()?, self.client.prepare(prompt.clone(), &self.options)).await;
            // A request that could not be made yet is made when it is tried again.
            let request = request.inspect_err(|_| self.prompt = Some(prompt))?;
            self.progress = Progress::new(request.acquire.num_choices);
            self.view().request_id = Some(request.generate.request_id.clone());
            self.request = Some(Box::new(request));
        }
        let client = Arc::clone(&self.client);
        let timeout = self.remaining()?.unwrap_or(QUEUE_TIMEOUT);
        let acquire = self.acquire_message()?;
        let grant = client
            .admission
            .acquire(&client.channels, &client.cell, &acquire, timeout);
        let grant = within(self.remaining()?, grant).await?;
        if let Some(quote) = grant.quote {
            self.view()
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
                Ok((attempt, started)) => {
                    unused.used = true;
                    drop(unused);
                    self.accepted(attempt, started);
                    return Ok(());
                }
                Err(error) if may_pass(&error, self.origin.is_some()) => {
                    first.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(first.unwrap_or_else(Error::deadline_passed))
    }

    fn accepted(&mut self, attempt: Attempt, started: GenerationStarted) {
        self.attempt = Some(attempt);
        self.seed = Some(started.seed);
        self.first_started.get_or_insert_with(|| Box::new(started));
        self.pursuit.started();
        self.client.budget.succeeded();
    }

    fn placed(&mut self, ticket: &Ticket) {
        self.ticket = Some(Box::new(ticket.clone()));
        self.view().agent = Some((ticket.agent_id.clone(), ticket.data_address.clone()));
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

    fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request(&self) -> &Prepared {
        self.request.as_ref().expect("it is made before anything is sent")
    }

    /// Waits until the request may be tried again, or fails with what ends the stream.
    async fn recover(&mut self, error: Error) -> Result<(), Error> {
        let accepted = self.attempt.take().is_some();
        let cut = self.pursuit.cut().cloned();
        let decision = self
            .pursuit
            .failed(&error, accepted, self.ticket.is_some(), Instant::now(), new_jitter());
        let Some((step, delay)) = decision.filter(|_| self.client.budget.spend()) else {
            return Err(not_resumed(cut, error));
        };
        if step == Step::Resume {
            self.origin.clone_from(&self.ticket);
            self.view().num_resumes = self.pursuit.num_resumes;
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

    fn into_result(self) -> GenerationResult {
        let quote = self.view().quote.clone();
        let Prepared { generate, .. } = *self.request.expect("it was sent");
        let started = self.first_started.unwrap_or_default();
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
            quote,
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
