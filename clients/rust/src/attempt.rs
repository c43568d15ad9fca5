//! One stream at one agent: opened with a ticket, accepted, read to its one end. Knows nothing of retries.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::time::Sleep;
use tokio_stream::Stream as _;
use tonic::{Code, Request, Status, Streaming};

use crate::catalogue::Reason;
use crate::channels::{Address, Channels, stub};
use crate::errors::{Error, is_lost, plain, wire_duration};
use crate::v1::generate_response::Event;
use crate::v1::generation_service_client::GenerationServiceClient;
use crate::v1::{
    ErrorDetail, GenerateRequest, GenerateResponse, GenerationDelta, GenerationFailed, GenerationFinished,
    GenerationStarted, Ticket,
};

/// The agent ends a request at its deadline by itself, with a reason; the transport cuts it this much later.
const DEADLINE_SLACK: Duration = Duration::from_millis(500);

/// What an accepted request does next.
pub(crate) enum Next {
    Delta(GenerationDelta),
    Finished(GenerationFinished),
}

/// A stream that an agent accepted. Dropping it cancels the request.
pub(crate) struct Attempt {
    ticket: Ticket,
    events: Streaming<GenerateResponse>,
    cut: Cut,
}

impl Attempt {
    /// Sends the request and waits until it is accepted. Fails when it is refused or the agent is lost.
    pub(crate) async fn open(
        channels: &Channels,
        ticket: &Ticket,
        mut message: GenerateRequest,
        deadline: Option<Instant>,
    ) -> Result<(Self, GenerationStarted), Error> {
        message.ticket_token = ticket.token.clone();
        let mut cut = Cut::new(deadline);
        let mut timeout = None;
        if let Some(deadline) = deadline {
            let remaining = deadline.saturating_duration_since(Instant::now());
            message.deadline = Some(wire_duration(remaining));
            timeout = Some(remaining + DEADLINE_SLACK);
        }
        let mut request = Request::new(message);
        if let Some(timeout) = timeout {
            request.set_timeout(timeout);
        }
        let channel = channels.get(&Address::new(&ticket.data_address, &ticket.agent_id))?;
        let mut stub = stub!(GenerationServiceClient, channel);
        let opened = cut.before(stub.generate(request)).await?;
        let events = opened
            .map_err(|status| failure_of(&status, ticket, deadline))?
            .into_inner();
        let mut attempt = Self {
            ticket: ticket.clone(),
            events,
            cut,
        };
        match poll_fn(|context| attempt.poll_event(context)).await? {
            Event::Started(started) if ticket.epoch != 0 && started.epoch != ticket.epoch => {
                Err(attempt.lost("is in another life than the ticket is for"))
            }
            Event::Started(started) => Ok((attempt, started)),
            Event::Failed(failed) => Err(failed_error(failed)),
            Event::Delta(_) | Event::Finished(_) => Err(attempt.lost("sent tokens before it accepted the request")),
        }
    }

    /// The next event. Fails when the request failed or the agent was lost. Plain polling: this is what every token goes through.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<Next, Error>> {
        Poll::Ready(match ready!(self.poll_event(context))? {
            Event::Delta(delta) => Ok(Next::Delta(delta)),
            Event::Finished(finished) => Ok(Next::Finished(finished)),
            Event::Failed(failed) => Err(failed_error(failed)),
            // A second start is the agent's next life, or another one behind the same address.
            Event::Started(_) => Err(self.lost("started the request a second time")),
        })
    }

    /// The error of an agent that can no longer be trusted with this stream.
    pub(crate) fn lost(&self, what: &str) -> Error {
        lost(&self.ticket, what)
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<Event, Error>> {
        let Poll::Ready(given) = Pin::new(&mut self.events).poll_next(context) else {
            ready!(self.cut.poll(context));
            return Poll::Ready(Err(Error::deadline_passed()));
        };
        Poll::Ready(match given {
            Some(Ok(GenerateResponse { event: Some(event) })) => Ok(event),
            Some(Ok(_)) => Err(self.lost("sent an event that this version does not know")),
            Some(Err(status)) => Err(failure_of(&status, &self.ticket, self.cut.deadline)),
            None => Err(self.lost("ended the stream without saying how the request ended")),
        })
    }
}

/// The end that the transport makes when the agent has not made one.
struct Cut {
    deadline: Option<Instant>,
    at: Option<Pin<Box<Sleep>>>,
}

impl Cut {
    fn new(deadline: Option<Instant>) -> Self {
        let at = deadline.map(|deadline| Box::pin(tokio::time::sleep_until((deadline + DEADLINE_SLACK).into())));
        Self { deadline, at }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.at.as_mut().map_or(Poll::Pending, |at| at.as_mut().poll(context))
    }

    /// What `call` gives, unless it takes too long.
    async fn before<R>(&mut self, call: impl Future<Output = R>) -> Result<R, Error> {
        tokio::select! {
            biased;
            given = call => Ok(given),
            () = poll_fn(|context| self.poll(context)) => Err(Error::deadline_passed()),
        }
    }
}

fn failed_error(failed: GenerationFailed) -> Error {
    let unsaid = || ErrorDetail {
        message: "the agent did not say why it failed".to_owned(),
        ..Default::default()
    };
    Error::from_detail(failed.error.unwrap_or_else(unsaid))
}

fn failure_of(status: &Status, ticket: &Ticket, deadline: Option<Instant>) -> Error {
    if let Some(said) = Error::said_by_server(status) {
        return said;
    }
    let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
    if status.code() == Code::DeadlineExceeded || (is_lost(status) && is_late) {
        return Error::deadline_passed();
    }
    if !is_lost(status) {
        return Error::from_plain_status(status);
    }
    let (text, transport) = plain(status);
    // An open agent is the only one there is: where nobody listens any more, there is less to wait for.
    let transport = ticket.agent_id.is_empty().then_some(transport);
    Error {
        transport,
        ..lost(ticket, &format!("cannot be reached: {text}"))
    }
}

fn lost(ticket: &Ticket, what: &str) -> Error {
    let (id, address) = (&ticket.agent_id, &ticket.data_address);
    let name = if id.is_empty() {
        format!("at {address}")
    } else {
        format!("{id} at {address}")
    };
    Error::new(Reason::AgentLost, format!("the agent {name} {what}"))
}
