//! The one error of the client: a reason of the catalogue, and what the server or the transport said.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::io;
use std::time::Duration;

use prost::Message as _;
use tonic::{Code, Status};

use crate::catalogue::Reason;
use crate::v1::ErrorDetail;

/// Where servers put the `ErrorDetail` of a failed call.
const ERROR_KEY: &str = "dragoman-error-bin";

/// Why the transport failed, where it failed and not the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// Nobody listens at the address, which is how a stopped server looks.
    Refused,
    /// Anything else.
    Broken,
}

/// Every failure of this crate.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Error {
    /// Why.
    pub reason: Reason,
    /// What happened, why, and what to do.
    pub message: String,
    /// How long the server asks to wait, where it named a delay.
    pub retry_delay: Option<Duration>,
    /// Facts such as "param", the path of a bad field.
    pub metadata: BTreeMap<String, String>,
    pub(crate) transport: Option<Transport>,
}

impl Error {
    pub(crate) fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            retry_delay: None,
            metadata: BTreeMap::new(),
            transport: None,
        }
    }

    /// The error of a bad argument.
    pub(crate) fn invalid(param: &str, message: impl fmt::Display) -> Self {
        let mut error = Self::new(Reason::InvalidRequest, format!("{param}: {message}"));
        error.metadata.insert("param".to_owned(), param.to_owned());
        error
    }

    pub(crate) fn deadline_passed() -> Self {
        Self::new(Reason::DeadlineExceeded, "the deadline of the request passed")
    }

    /// Whether the same request may succeed later or elsewhere.
    pub fn retryable(&self) -> bool {
        self.reason.traits().retryable
    }

    /// Canonical gRPC status code of the reason.
    pub fn grpc_code(&self) -> Code {
        Code::from_i32(self.reason.traits().grpc_code)
    }

    /// HTTP status of the reason.
    pub fn http_status(&self) -> u16 {
        self.reason.traits().http_status
    }

    pub(crate) fn from_detail(detail: ErrorDetail) -> Self {
        Self {
            reason: Reason::from_number(detail.reason),
            message: detail.message,
            retry_delay: detail.retry_delay.map(duration_of),
            metadata: detail.metadata.into_iter().collect(),
            transport: None,
        }
    }

    /// The server's own word on a failed call; `None` where only the transport has spoken.
    pub(crate) fn said_by_server(status: &Status) -> Option<Self> {
        let value = status.metadata().get_bin(ERROR_KEY)?;
        let detail = value.to_bytes().ok().and_then(|bytes| ErrorDetail::decode(bytes).ok());
        Some(detail.map_or_else(
            || Self::new(Reason::Internal, "the server sent an error that cannot be read"),
            Self::from_detail,
        ))
    }

    /// The error of a status without a detail: the nearest reason of its code.
    pub(crate) fn from_plain_status(status: &Status) -> Self {
        let reason = match status.code() {
            Code::Cancelled => Reason::Cancelled,
            Code::DeadlineExceeded => Reason::DeadlineExceeded,
            Code::InvalidArgument => Reason::InvalidRequest,
            Code::Unimplemented => Reason::Unimplemented,
            Code::Unavailable => Reason::AgentLost,
            // tonic itself says OutOfRange of a message over the size limit.
            Code::ResourceExhausted | Code::OutOfRange => Reason::RequestTooLarge,
            Code::Unauthenticated => Reason::InvalidApiKey,
            Code::PermissionDenied => Reason::PermissionDenied,
            Code::NotFound => Reason::ModelNotServed,
            _ => Reason::Internal,
        };
        let message = if status.message().is_empty() {
            status.code().description()
        } else {
            status.message()
        };
        Self::new(reason, message)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.reason, self.message)
    }
}

impl std::error::Error for Error {}

/// Whether a connection or a process that went away shows itself in the code of a status without a detail.
pub(crate) fn is_lost(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal
    )
}

/// Whether the connection failed, and not the call: a status that was received has no source.
pub(crate) fn is_of_transport(status: &Status) -> bool {
    status.code() == Code::Unavailable || (is_lost(status) && status.source().is_some())
}

/// What the transport says, without the layers that are wrapped around it.
pub(crate) fn plain(status: &Status) -> (String, Transport) {
    let mut innermost = status.message().to_owned();
    let mut source = status.source();
    while let Some(cause) = source {
        if cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        {
            return ("connection refused".to_owned(), Transport::Refused);
        }
        innermost = cause.to_string();
        source = cause.source();
    }
    (innermost, Transport::Broken)
}

/// A received duration; a negative one counts as none.
pub(crate) fn duration_of(duration: prost_types::Duration) -> Duration {
    Duration::try_from(duration).unwrap_or_default()
}

/// A duration to be sent; one that is too long for the protocol is its longest.
pub(crate) fn wire_duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration::try_from(duration).unwrap_or(prost_types::Duration {
        seconds: i64::MAX,
        nanos: 0,
    })
}

#[cfg(test)]
mod tests;
