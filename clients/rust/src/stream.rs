//! The stream a caller reads: items as they come, the whole at the end, and who runs it now.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio_stream::Stream;

use crate::catalogue::Reason;
use crate::client::Inner;
use crate::errors::Error;
use crate::follow::Generation;
use crate::request::{GenerateOptions, Prompt};
use crate::results::{GenerationResult, Quote, Token};

/// One generation; a `Stream` of its items.
///
/// Nothing is sent before it is first polled. An agent that dies is replaced and the stream goes on at the next token, at most 3
/// times; the reader only sees a pause. It ends after the last item, or with one error. Dropping it cancels what still runs.
pub struct GenerationStream {
    shared: Arc<Shared>,
    following: Option<Following>,
    /// Why there is no result, once there cannot be one.
    failure: Option<Error>,
    result: Option<GenerationResult>,
}

type Following = Pin<Box<dyn Future<Output = Result<GenerationResult, Error>> + Send>>;

impl GenerationStream {
    pub(crate) fn new(client: Arc<Inner>, prompt: Prompt, options: GenerateOptions) -> Self {
        let shared = Arc::new(Shared::default());
        let generation = Generation::new(
            Arc::clone(&client),
            Arc::clone(&shared),
            prompt,
            options,
            Instant::now(),
        );
        let following = Box::pin(async move {
            tokio::select! {
                biased;
                outcome = generation.follow() => outcome,
                closed = client.channels.closing() => Err(closed),
            }
        });
        Self {
            shared,
            following: Some(following),
            failure: None,
            result: None,
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
        let unread = || Error::new(Reason::Cancelled, "the stream was closed before its end");
        self.result.ok_or_else(|| self.failure.unwrap_or_else(unread))
    }

    /// Cancels what still runs, as dropping it does; may be called more than once.
    pub fn close(&mut self) {
        self.following = None;
    }

    /// Id of the request; `None` until it is made, when the stream is first polled.
    pub fn request_id(&self) -> Option<String> {
        self.shared.view().request_id.clone()
    }

    /// The agent that runs it now; `None` before it is placed, empty for an open agent.
    pub fn agent_id(&self) -> Option<String> {
        self.shared.view().agent.as_ref().map(|(id, _)| id.clone())
    }

    /// Data address of that agent.
    pub fn agent_address(&self) -> Option<String> {
        self.shared.view().agent.as_ref().map(|(_, address)| address.clone())
    }

    /// How often it was continued after a cut.
    pub fn num_resumes(&self) -> u32 {
        self.shared.view().num_resumes
    }

    /// What the controller promised; `None` until it is placed, and for an open agent.
    pub fn quote(&self) -> Option<Quote> {
        self.shared.view().quote.clone()
    }

    fn poll_item(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Token, Error>>> {
        let Some(following) = &mut self.following else {
            return Poll::Ready(None);
        };
        let polled = following.as_mut().poll(context);
        if polled.is_pending()
            && let Some(token) = self.shared.item().take()
        {
            return Poll::Ready(Some(Ok(token)));
        }
        let outcome = ready!(polled);
        self.following = None;
        match outcome {
            Ok(result) => {
                self.result = Some(result);
                Poll::Ready(None)
            }
            Err(error) => {
                self.failure = Some(error.clone());
                Poll::Ready(Some(Err(error)))
            }
        }
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
        let view = self.shared.view();
        formatter
            .debug_struct("GenerationStream")
            .field("request_id", &view.request_id)
            .field("agent", &view.agent)
            .field("num_resumes", &view.num_resumes)
            .field("running", &self.following.is_some())
            .finish_non_exhaustive()
    }
}

/// Between the reader and what it drives: the next item, and what is known of the request.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    item: Mutex<Option<Token>>,
    view: Mutex<View>,
}

#[derive(Debug, Default)]
pub(crate) struct View {
    pub(crate) request_id: Option<String>,
    /// Id and data address.
    pub(crate) agent: Option<(String, String)>,
    pub(crate) num_resumes: u32,
    pub(crate) quote: Option<Quote>,
}

impl Shared {
    pub(crate) fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands an item to the reader, and goes on when the next one is asked for.
    pub(crate) async fn give(&self, token: Token) {
        *self.item() = Some(token);
        let mut given = false;
        poll_fn(|_| {
            // Not woken by anything: the reader polls again when it wants more.
            if std::mem::replace(&mut given, true) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }

    fn item(&self) -> MutexGuard<'_, Option<Token>> {
        self.item.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
