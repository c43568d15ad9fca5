//! The connections of a client: one an address, with the HTTP/2 settings of the protocol.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};

use crate::catalogue::Reason;
use crate::errors::Error;

/// A prompt of 1M token ids takes 4 MB and the tokenizer's files more; the default limit is 4 MB.
pub(crate) const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// What a reader that stalls can have in flight before the agent's write waits: about 1,000 tokens.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;
/// One stalled stream must not hold up the others of its connection.
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// A silent peer is noticed within 4.5 + 2 s.
const KEEPALIVE_INTERVAL: Duration = Duration::from_millis(4500);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Where a server is dialled; with TLS, an agent's certificate must name its id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Address {
    pub(crate) target: String,
    pub(crate) agent_id: String,
}

impl Address {
    pub(crate) fn new(target: impl Into<String>, agent_id: impl Into<String>) -> Self {
        Self {
            target: target.into(),
            agent_id: agent_id.into(),
        }
    }
}

/// Owner of the connections. They are made within a tokio runtime.
pub(crate) struct Channels {
    tls: Option<ClientTlsConfig>,
    open: Mutex<HashMap<Address, Channel>>,
    closed: AtomicBool,
    closing: Notify,
}

impl Channels {
    pub(crate) fn new(tls: Option<ClientTlsConfig>) -> Self {
        Self {
            tls,
            open: Mutex::default(),
            closed: AtomicBool::new(false),
            closing: Notify::new(),
        }
    }

    pub(crate) fn get(&self, address: &Address) -> Result<Channel, Error> {
        let mut key = address.clone();
        if self.tls.is_none() {
            key.agent_id.clear();
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_closed() {
            return Err(closed());
        }
        if let Some(channel) = open.get(&key) {
            return Ok(channel.clone());
        }
        let channel = self.endpoint(&key)?.connect_lazy();
        open.insert(key, channel.clone());
        Ok(channel)
    }

    /// Forgets all connections; each is closed when the last call on it ends.
    pub(crate) fn close(&self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        self.closed.store(true, Ordering::Release);
        open.clear();
        self.closing.notify_waiters();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Returns once the client is closed.
    pub(crate) async fn closing(&self) -> Error {
        let mut notified = pin!(self.closing.notified());
        // Listens before it looks: what comes in between is not missed.
        notified.as_mut().enable();
        if !self.is_closed() {
            notified.await;
        }
        closed()
    }

    fn endpoint(&self, address: &Address) -> Result<Endpoint, Error> {
        let target = &address.target;
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{target}"))
            .map_err(|error| Error::invalid("address", format!("{target:?} is not one ({error}); give host:port")))?
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            // The probe grows the window, which hides a slow reader.
            .http2_adaptive_window(false)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            // An idle connection is watched too, so that the next request does not find it dead.
            .keep_alive_while_idle(true)
            .connect_timeout(CONNECT_TIMEOUT);
        if let Some(tls) = &self.tls {
            let mut tls = tls.clone();
            if !address.agent_id.is_empty() {
                tls = tls.domain_name(&address.agent_id);
            }
            endpoint = endpoint
                .tls_config(tls)
                .map_err(|error| Error::invalid("tls", format!("cannot be used: {}", innermost(&error))))?;
        }
        Ok(endpoint)
    }
}

pub(crate) fn closed() -> Error {
    Error::new(Reason::Cancelled, "the client is closed")
}

fn innermost(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), innermost)
}

/// The stub of a service on a connection, with the message limits of the protocol.
macro_rules! stub {
    ($stub:ident, $channel:expr) => {
        $stub::new($channel)
            .max_decoding_message_size($crate::channels::MAX_MESSAGE_BYTES)
            .max_encoding_message_size($crate::channels::MAX_MESSAGE_BYTES)
    };
}
pub(crate) use stub;
