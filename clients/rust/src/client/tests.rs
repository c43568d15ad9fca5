use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use super::*;

fn refused(config: Config) -> Error {
    Client::new(config).unwrap_err()
}

#[test]
fn a_configuration_that_makes_no_sense_is_refused() {
    let both = Config {
        controller: Some("a:1".into()),
        agent: Some("b:2".into()),
        ..Default::default()
    };
    assert_eq!(refused(both).metadata["param"], "agent");
    assert_eq!(
        refused(Config {
            agent: Some(" ".into()),
            ..Default::default()
        })
        .metadata["param"],
        "agent"
    );
    assert_eq!(
        refused(Config {
            controller: Some("".into()),
            ..Default::default()
        })
        .metadata["param"],
        "controller"
    );
    let retry = RetryPolicy {
        max_attempts: 0,
        ..Default::default()
    };
    assert_eq!(
        refused(Config {
            retry,
            ..Default::default()
        })
        .metadata["param"],
        "retry.max_attempts"
    );
}

#[tokio::test(flavor = "current_thread")]
async fn an_address_that_is_none_is_named() {
    let client = Client::new(Config {
        agent: Some("no address".into()),
        ..Default::default()
    })
    .unwrap();
    let error = client.models().await.unwrap_err();
    assert_eq!(error.reason, Reason::InvalidRequest);
    assert!(error.message.contains("no address"), "{error}");
}

#[tokio::test(flavor = "current_thread")]
async fn a_certificate_that_is_none_is_an_error_of_the_caller() {
    let authority =
        tonic::transport::Certificate::from_pem("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n");
    let tls = Some(ClientTlsConfig::new().ca_certificate(authority));
    let client = Client::new(Config {
        agent: Some("127.0.0.1:1".into()),
        tls,
        ..Default::default()
    })
    .unwrap();
    let error = client.models().await.unwrap_err();
    assert_eq!(
        (error.reason, error.metadata["param"].as_str()),
        (Reason::InvalidRequest, "tls")
    );
}

/// A client of an agent that takes connections and never says anything. The listener must be kept.
fn client_of_a_mute_agent() -> (Client, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let agent = Some(listener.local_addr().unwrap().to_string());
    (
        Client::new(Config {
            agent,
            ..Default::default()
        })
        .unwrap(),
        listener,
    )
}

fn of_model_m() -> GenerateOptions {
    GenerateOptions {
        model: Some("m".into()),
        ..Default::default()
    }
}

#[tokio::test(flavor = "current_thread")]
async fn closing_the_client_ends_streams_and_calls_under_way() {
    let (client, _mute) = client_of_a_mute_agent();
    let mut stream = client.generate("hi", of_model_m());
    let closing = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        client.close().await;
    };
    let (item, called, ()) = tokio::join!(stream.next(), client.models(), closing);
    assert_eq!(item.unwrap().unwrap_err().reason, Reason::Cancelled);
    assert_eq!(called.unwrap_err().reason, Reason::Cancelled);
    assert!(stream.next().await.is_none(), "an error is the end");
    assert_eq!(client.models().await.unwrap_err().message, "the client is closed");
}

#[tokio::test(flavor = "current_thread")]
async fn a_stream_that_was_closed_has_no_result() {
    let (client, _mute) = client_of_a_mute_agent();
    let mut stream = client.generate("hi", of_model_m());
    stream.close();
    assert!(stream.next().await.is_none());
    assert_eq!(stream.result().await.unwrap_err().reason, Reason::Cancelled);
}

#[tokio::test(flavor = "current_thread")]
async fn the_transport_ends_what_the_agent_does_not() {
    let (client, _mute) = client_of_a_mute_agent();
    let deadline = Some(Duration::from_millis(50));
    let error = client
        .complete(
            "hi",
            GenerateOptions {
                deadline,
                ..of_model_m()
            },
        )
        .await
        .unwrap_err();
    assert_eq!(error.reason, Reason::DeadlineExceeded);
}

/// SETTINGS, and the headers of an answer with status 200 on stream 1 (RFC 9113 section 6, RFC 7541 section 6.1): no event follows.
const ACCEPTED: &[u8] = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x01\x01\x04\x00\x00\x00\x01\x88";

#[tokio::test(flavor = "current_thread")]
async fn the_transport_ends_a_stream_on_which_nothing_comes() {
    let (client, listener) = client_of_a_mute_agent();
    let agent = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        let request = &mut [0; 24];
        connection.read_exact(request).unwrap();
        connection.write_all(ACCEPTED).unwrap();
        // Until the client gives up.
        while connection.read(request).is_ok_and(|read| read > 0) {}
    });
    let deadline = Some(Duration::from_millis(50));
    let completed = client.complete(
        "hi",
        GenerateOptions {
            deadline,
            ..of_model_m()
        },
    );
    let ended = tokio::time::timeout(Duration::from_secs(4), completed).await;
    assert_eq!(ended.unwrap().unwrap_err().reason, Reason::DeadlineExceeded);
    drop(client);
    tokio::task::spawn_blocking(|| agent.join().unwrap()).await.unwrap();
}

#[test]
fn streams_go_between_threads_and_may_be_dropped_outside_of_the_runtime() {
    fn is_send<T: Send>(_: &T) {}
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (client, _mute) = client_of_a_mute_agent();
    let mut stream = client.generate("hi", of_model_m());
    is_send(&stream);
    runtime.block_on(async {
        tokio::time::timeout(Duration::from_millis(50), stream.next())
            .await
            .unwrap_err()
    });
    drop(stream);
}
