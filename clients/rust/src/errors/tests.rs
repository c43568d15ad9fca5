use tonic::metadata::{MetadataMap, MetadataValue};

use super::*;

fn refused_with(detail: &[u8]) -> Status {
    let mut metadata = MetadataMap::new();
    metadata.insert_bin(ERROR_KEY, MetadataValue::from_bytes(detail));
    Status::with_metadata(Code::ResourceExhausted, "ignored", metadata)
}

#[test]
fn every_reason_survives_its_number() {
    let known: Vec<Reason> = (0..)
        .map(Reason::from_number)
        .take_while(|r| !matches!(r, Reason::Unknown(_)))
        .collect();
    assert!(known.len() > 30);
    for (number, reason) in known.into_iter().enumerate() {
        assert_eq!(reason.number() as usize, number);
        let wire = crate::v1::ErrorReason::try_from(reason.number()).unwrap().as_str_name();
        assert_eq!(format!("ERROR_REASON_{}", reason.to_string().to_uppercase()), wire);
    }
}

#[test]
fn a_reason_of_a_newer_version_is_named_by_its_number_and_final() {
    let error = Error::new(Reason::from_number(99), "new");
    assert_eq!(error.to_string(), "unknown_99: new");
    assert!(!error.retryable());
    assert_eq!((error.http_status(), error.grpc_code()), (500, Code::Internal));
}

#[test]
fn the_servers_own_word_comes_from_the_trailing_metadata() {
    let detail = ErrorDetail {
        reason: 1,
        message: "full".to_owned(),
        retry_delay: Some(prost_types::Duration {
            seconds: 1,
            nanos: 500_000_000,
        }),
        metadata: [("limit".to_owned(), "8".to_owned())].into(),
    };
    let error = Error::said_by_server(&refused_with(&detail.encode_to_vec())).unwrap();
    assert_eq!((error.reason, error.message.as_str()), (Reason::QueueFull, "full"));
    assert_eq!(error.retry_delay, Some(Duration::from_millis(1500)));
    assert_eq!(error.metadata["limit"], "8");
    assert!(error.retryable());
}

#[test]
fn a_detail_that_cannot_be_read_is_internal() {
    assert_eq!(
        Error::said_by_server(&refused_with(b"\xff\xff")).unwrap().reason,
        Reason::Internal
    );
    assert_eq!(Error::said_by_server(&Status::internal("no detail")), None);
}

#[test]
fn a_status_without_a_detail_has_the_nearest_reason() {
    for (code, reason) in [
        (Code::Cancelled, Reason::Cancelled),
        (Code::DeadlineExceeded, Reason::DeadlineExceeded),
        (Code::InvalidArgument, Reason::InvalidRequest),
        (Code::Unimplemented, Reason::Unimplemented),
        (Code::Unavailable, Reason::AgentLost),
        (Code::ResourceExhausted, Reason::RequestTooLarge),
        (Code::OutOfRange, Reason::RequestTooLarge),
        (Code::Unauthenticated, Reason::InvalidApiKey),
        (Code::PermissionDenied, Reason::PermissionDenied),
        (Code::NotFound, Reason::ModelNotServed),
        (Code::DataLoss, Reason::Internal),
    ] {
        let error = Error::from_plain_status(&Status::new(code, ""));
        assert_eq!(error.reason, reason);
        assert_eq!(error.message, code.description());
    }
}

#[test]
fn what_the_transport_says_is_told_from_what_a_server_says() {
    let refused = Status::from_error(Box::new(io::Error::from(io::ErrorKind::ConnectionRefused)));
    assert!(is_of_transport(&refused));
    assert_eq!(plain(&refused), ("connection refused".to_owned(), Transport::Refused));
    let reset = Status::from_error(Box::new(io::Error::new(
        io::ErrorKind::ConnectionReset,
        "reset by peer",
    )));
    assert_eq!(plain(&reset), ("reset by peer".to_owned(), Transport::Broken));
    assert!(is_of_transport(&Status::unavailable("gone")));
    assert!(!is_of_transport(&Status::internal("a fault of the server")));
    assert!(!is_of_transport(&Status::permission_denied("go away")));
}

#[test]
fn durations_on_the_wire() {
    assert_eq!(
        duration_of(prost_types::Duration { seconds: -1, nanos: 0 }),
        Duration::ZERO
    );
    assert_eq!(
        wire_duration(Duration::from_millis(1250)),
        prost_types::Duration {
            seconds: 1,
            nanos: 250_000_000
        }
    );
    assert_eq!(wire_duration(Duration::MAX).seconds, i64::MAX);
}
