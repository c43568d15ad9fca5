//! The stream a caller reads: items as they come, the whole at the end, and who runs it now.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;

use tokio_stream::Stream;

use crate::catalogue::Reason;
use crate::channels::closed;
use crate::client::Inner;
use crate::errors::Error;
use crate::follow::{Generation, View};
use crate::request::{GenerateOptions, Prompt};
use crate::results::{GenerationResult, Quote, Token};

/// One generation; a `Stream` of its items.
///
/// Nothing is sent before it is first polled. An agent that dies is replaced and the stream goes on at the next token, at most 3
/// times; the reader only sees a pause. It ends after the last item, or with one error. Dropping it cancels what still runs.
pub struct GenerationStream {
    state: State,
    closing: Closing,
    view: Arc<Mutex<View>>,
    outcome: Option<Result<GenerationResult, Error>>,
}

enum State {
    /// It is being admitted and accepted, for the first time or again.
    Opening(Pin<Box<dyn Future<Output = Result<Box<Generation>, Error>> + Send>>),
    /// Tokens come.
    Reading(Box<Generation>),
    /// All tokens are here, and the agent's figures are waited for.
    Finishing(Pin<Box<dyn Future<Output = GenerationResult> + Send>>),
    Over,
}

impl GenerationStream {
    pub(crate) fn new(client: Arc<Inner>, prompt: Prompt, options: GenerateOptions) -> Self {
        let view = Arc::default();
        let generation = Generation::new(Arc::clone(&client), Arc::clone(&view), prompt, options, Instant::now());
        Self {
            state: State::Opening(Box::pin(Box::new(generation).open(None))),
            closing: Closing::new(client),
            view,
            outcome: None,
        }
    }

    /// The next item, as `StreamExt::next`: `None` after the last one or after an error.
    pub async fn next(&mut self) -> Option<Result<Token, Error>> {
        poll_fn(|context| self.poll_item(context)).await
    }

    /// Reads what is left and returns the whole. Fails with CANCELLED when it was closed before.
    pub async fn result(mut self) -> Result<GenerationResult, Error> {
        while let Some(item) = self.next().await {
            item?;
        }
        let unread = || Err(Error::new(Reason::Cancelled, "the stream was closed before its end"));
        self.outcome.unwrap_or_else(unread)
    }

    /// Cancels what still runs, as dropping it does; may be called more than once.
    pub fn close(&mut self) {
        self.state = State::Over;
    }

    /// Id of the request; `None` until it is made, when the stream is first polled.
    pub fn request_id(&self) -> Option<String> {
        self.view().request_id.clone()
    }

    /// The agent that runs it now; `None` before it is placed, empty for an open agent.
    pub fn agent_id(&self) -> Option<String> {
        self.view().agent.as_ref().map(|(id, _)| id.clone())
    }

    /// Data address of that agent.
    pub fn agent_address(&self) -> Option<String> {
        self.view().agent.as_ref().map(|(_, address)| address.clone())
    }

    /// How often it was continued after a cut.
    pub fn num_resumes(&self) -> u32 {
        self.view().num_resumes
    }

    /// What the controller promised; `None` until it is placed, and for an open agent.
    pub fn quote(&self) -> Option<Quote> {
        self.view().quote.clone()
    }

    fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll_item(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Token, Error>>> {
        if !matches!(self.state, State::Over)
            && let Poll::Ready(closed) = self.closing.poll(context)
        {
            return self.fail(closed);
        }
        loop {
            self.state = match &mut self.state {
                State::Opening(opening) => match ready!(opening.as_mut().poll(context)) {
                    Ok(generation) => State::Reading(generation),
                    Err(error) => return self.fail(error),
                },
                State::Reading(generation) => match ready!(generation.poll_token(context)) {
                    Ok(Some(token)) => return Poll::Ready(Some(Ok(token))),
                    read => self.after_reading(read.err()),
                },
                State::Finishing(finishing) => {
                    self.outcome = Some(Ok(ready!(finishing.as_mut().poll(context))));
                    State::Over
                }
                State::Over => return Poll::Ready(None),
            };
        }
    }

    /// What comes after the last token, or after a failure.
    fn after_reading(&mut self, failure: Option<Error>) -> State {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Reading(generation) if failure.is_some() => State::Opening(Box::pin(generation.open(failure))),
            State::Reading(generation) => State::Finishing(Box::pin(generation.finish())),
            other => other,
        }
    }

    fn fail(&mut self, error: Error) -> Poll<Option<Result<Token, Error>>> {
        self.state = State::Over;
        self.outcome = Some(Err(error.clone()));
        Poll::Ready(Some(Err(error)))
    }
}

impl Stream for GenerationStream {
    type Item = Result<Token, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_item(context)
    }
}

impl std::fmt::Debug for GenerationStream {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let view = self.view();
        formatter
            .debug_struct("GenerationStream")
            .field("request_id", &view.request_id)
            .field("agent", &view.agent)
            .field("num_resumes", &view.num_resumes)
            .field("over", &matches!(self.state, State::Over))
            .finish_non_exhaustive()
    }
}

/// The end of the client, as a stream waits for it.
struct Closing {
    client: Arc<Inner>,
    wait: Pin<Box<dyn Future<Output = Error> + Send>>,
    /// Whom `wait` wakes.
    waker: Option<Waker>,
}

impl Closing {
    fn new(client: Arc<Inner>) -> Self {
        let waiting = Arc::clone(&client);
        let wait = Box::pin(async move { waiting.channels.closing().await });
        Self {
            client,
            wait,
            waker: None,
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Error> {
        if self.client.channels.is_closed() {
            return Poll::Ready(closed());
        }
        // As long as it wakes the same reader there is nothing to do, which every token gains by.
        if self
            .waker
            .as_ref()
            .is_some_and(|waker| waker.will_wake(context.waker()))
        {
            return Poll::Pending;
        }
        self.waker = Some(context.waker().clone());
        self.wait.as_mut().poll(context)
    }
}
