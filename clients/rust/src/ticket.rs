//! Where a request may go: tickets from a controller, or one open agent that takes requests without.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ring::digest::{SHA256, digest};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::catalogue::Reason;
use crate::channels::{Address, Channels, stub};
use crate::controllers::Controllers;
use crate::errors::{Error, is_lost, is_of_transport, plain};
use crate::v1::admission_service_client::AdmissionServiceClient;
use crate::v1::{AcquireTicketRequest, LatencyQuote, ReleaseTicketRequest, Ticket};

/// The longest wait for a call that does not wait for capacity.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The longest wait in the controller's queue when neither the request nor the policy bounds it sooner.
pub(crate) const QUEUE_TIMEOUT: Duration = Duration::from_secs(600);
/// How long `close` waits for tickets on their way back.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

/// Tickets in the order in which they are to be tried.
#[derive(Debug)]
pub(crate) struct Grant {
    pub(crate) tickets: Vec<Ticket>,
    pub(crate) quote: Option<LatencyQuote>,
}

/// Whom a client asks for admission.
#[derive(Debug)]
pub(crate) enum Cell {
    /// Controllers grant tickets.
    Controllers(Controllers),
    /// One agent that was started with --open: every request goes to it, without a ticket.
    OpenAgent(Address),
}

/// Grants requests. Owner of the tickets on their way back.
#[derive(Debug, Default)]
pub(crate) struct Admission {
    /// One for each ticket on its way; it reads as closed once the ticket is back.
    releases: Mutex<Vec<watch::Receiver<()>>>,
}

impl Admission {
    /// Waits for capacity. Tickets on their way back arrive first: until then, asking again gives the same ones.
    pub(crate) async fn acquire(
        &self,
        channels: &Channels,
        cell: &Cell,
        request: &AcquireTicketRequest,
        timeout: Duration,
    ) -> Result<Grant, Error> {
        let controllers = match cell {
            Cell::OpenAgent(address) => {
                let ticket = Ticket {
                    data_address: address.target.clone(),
                    ..Default::default()
                };
                return Ok(Grant {
                    tickets: vec![ticket],
                    quote: None,
                });
            }
            Cell::Controllers(controllers) => controllers,
        };
        self.returned().await;
        let granted = ask_controller(channels, controllers, timeout, |channel| {
            let request = timed(request.clone(), timeout);
            async move { stub!(AdmissionServiceClient, channel).acquire_ticket(request).await }
        })
        .await?;
        let tickets: Vec<Ticket> = granted.ticket.into_iter().chain(granted.fallback_ticket).collect();
        if tickets.is_empty() {
            return Err(Error::new(
                Reason::Internal,
                "the controller granted the request without a ticket",
            ));
        }
        Ok(Grant {
            tickets,
            quote: granted.quote,
        })
    }

    /// Returns a ticket in the background; one that cannot be returned expires by itself.
    fn release(&self, channels: &Channels, cell: &Cell, ticket: &Ticket, runtime: &Handle) {
        let Cell::Controllers(controllers) = cell else { return };
        let Ok(channel) = channels.get(controllers.current()) else {
            return;
        };
        let (under_way, returned) = watch::channel(());
        let mut releases = self.releases.lock().unwrap_or_else(PoisonError::into_inner);
        releases.retain(|release| release.has_changed().is_ok());
        releases.push(returned);
        let request = timed(
            ReleaseTicketRequest {
                token: ticket.token.clone(),
            },
            CALL_TIMEOUT,
        );
        runtime.spawn(async move {
            let mut stub = stub!(AdmissionServiceClient, channel);
            let _ = tokio::time::timeout(CALL_TIMEOUT, stub.release_ticket(request)).await;
            drop(under_way);
        });
    }

    /// Waits shortly for the tickets on their way back.
    pub(crate) async fn close(&self) {
        let _ = tokio::time::timeout(RELEASE_TIMEOUT, self.returned()).await;
    }

    /// Waits for the tickets that are on their way now.
    async fn returned(&self) {
        let pending = self.releases.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for mut release in pending {
            let _ = release.changed().await; // nothing is ever sent: it ends when the sender goes
        }
    }
}

/// A ticket that goes back unless it is used, also where its owner is dropped in the middle of a call.
pub(crate) struct Unused<'a> {
    pub(crate) admission: &'a Admission,
    pub(crate) channels: &'a Channels,
    pub(crate) cell: &'a Cell,
    pub(crate) ticket: &'a Ticket,
    pub(crate) runtime: Handle,
    pub(crate) used: bool,
}

impl Drop for Unused<'_> {
    fn drop(&mut self) {
        if !self.used {
            // A connection may have to be made, which needs the runtime; the stream can be dropped outside of it.
            let _entered = self.runtime.enter();
            self.admission
                .release(self.channels, self.cell, self.ticket, &self.runtime);
        }
    }
}

/// A message with a limit that the server is told.
pub(crate) fn timed<M>(message: M, timeout: Duration) -> Request<M> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// The answer of a unary call to the first controller that gives one.
pub(crate) async fn ask_controller<R, F>(
    channels: &Channels,
    controllers: &Controllers,
    timeout: Duration,
    call: impl Fn(Channel) -> F,
) -> Result<R, Error>
where
    F: Future<Output = Result<Response<R>, Status>>,
{
    let call = &call;
    let remedy = "start one with 'dragoman up', or give its address";
    controllers
        .ask(|address| async move { ask(channels, &address, timeout, "controller", remedy, call).await })
        .await
}

/// The answer of a unary call to an agent.
pub(crate) async fn ask_agent<R, F>(
    channels: &Channels,
    address: &Address,
    timeout: Duration,
    call: impl Fn(Channel) -> F,
) -> Result<R, Error>
where
    F: Future<Output = Result<Response<R>, Status>>,
{
    ask(
        channels,
        address,
        timeout,
        "agent",
        "see 'dragoman ps' for the agents that are up",
        &call,
    )
    .await
}

async fn ask<R, F>(
    channels: &Channels,
    address: &Address,
    timeout: Duration,
    whom: &str,
    remedy: &str,
    call: &impl Fn(Channel) -> F,
) -> Result<R, Error>
where
    F: Future<Output = Result<Response<R>, Status>>,
{
    let target = &address.target;
    let late = || {
        Error::new(
            Reason::DeadlineExceeded,
            format!("the {whom} at {target} did not answer in time"),
        )
    };
    let channel = channels.get(address)?;
    let began = Instant::now();
    let status = tokio::select! {
        biased;
        answer = tokio::time::timeout(timeout, call(channel)) => match answer {
            Ok(Ok(response)) => return Ok(response.into_inner()),
            Ok(Err(status)) => status,
            Err(_) => return Err(late()),
        },
        error = channels.closing() => return Err(error),
    };
    if let Some(said) = Error::said_by_server(&status) {
        return Err(said);
    }
    // The transport, which keeps the same limit, may be the first to end the call, and says only that it was cancelled.
    if status.code() == Code::DeadlineExceeded || (is_lost(&status) && began.elapsed() >= timeout) {
        return Err(late());
    }
    if is_of_transport(&status) {
        let (text, transport) = plain(&status);
        let message = format!("cannot reach the {whom} at {target}: {text}; {remedy}");
        return Err(Error {
            transport: Some(transport),
            ..Error::new(Reason::NoAgent, message)
        });
    }
    Err(Error::from_plain_status(&status))
}

/// What a ticket binds of a prompt sent as text.
pub(crate) fn digest_of_text(text: &str) -> Vec<u8> {
    digest(&SHA256, text.as_bytes()).as_ref().to_vec()
}

/// What a ticket binds of a prompt sent as ids: little-endian words.
pub(crate) fn digest_of_tokens(token_ids: &[u32]) -> Vec<u8> {
    let words: Vec<u8> = token_ids.iter().flat_map(|token_id| token_id.to_le_bytes()).collect();
    digest(&SHA256, &words).as_ref().to_vec()
}

/// What a ticket binds of an embedding request: the digest of its one input, or SHA-256 over those of several.
pub(crate) fn digest_of_inputs(digests: &[Vec<u8>]) -> Vec<u8> {
    match digests {
        [only] => only.clone(),
        several => digest(&SHA256, &several.concat()).as_ref().to_vec(),
    }
}

#[cfg(test)]
mod tests;
