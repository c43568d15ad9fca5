use serde_json::Value;

use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}

#[test]
fn digests_are_those_of_every_language() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../conformance/hashes.json")).unwrap();
    let vectors: Value = serde_json::from_str(&text).unwrap();
    let vectors = vectors["prompt_digests"].as_array().unwrap();
    assert!(vectors.len() > 3);
    for vector in vectors {
        let digest = if let Some(text) = vector["text"].as_str() {
            digest_of_text(text)
        } else if let Some(ids) = vector["token_ids"].as_array() {
            digest_of_tokens(&ids.iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<_>>())
        } else {
            let digests = vector["digests"].as_array().unwrap();
            digest_of_inputs(
                &digests
                    .iter()
                    .map(|digest| bytes_of(digest.as_str().unwrap()))
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(hex(&digest), vector["digest"]);
    }
}

#[tokio::test(flavor = "current_thread")]
async fn an_open_agent_grants_at_once_without_a_token() {
    let cell = Cell::OpenAgent(Address::new("127.0.0.1:1", ""));
    let request = AcquireTicketRequest::default();
    let grant = Admission::default()
        .acquire(&Channels::new(None), &cell, &request, CALL_TIMEOUT)
        .await
        .unwrap();
    assert_eq!(grant.tickets.len(), 1);
    assert_eq!(
        (grant.tickets[0].data_address.as_str(), grant.tickets[0].token.len()),
        ("127.0.0.1:1", 0)
    );
}

#[tokio::test(flavor = "current_thread")]
async fn a_ticket_that_was_not_used_is_on_its_way_back() {
    let channels = Channels::new(None);
    let cell = Cell::Controllers(Controllers::new("127.0.0.1:1").unwrap());
    let (admission, ticket) = (Admission::default(), Ticket::default());
    let runtime = Handle::current();
    let unused = |used| Unused {
        admission: &admission,
        channels: &channels,
        cell: &cell,
        ticket: &ticket,
        runtime: runtime.clone(),
        used,
    };
    drop(unused(true));
    assert_eq!(admission.releases.lock().unwrap().len(), 0);
    drop(unused(false));
    assert!(
        admission.releases.lock().unwrap()[0].has_changed().is_ok(),
        "it is under way"
    );
    admission.returned().await; // nobody listens there, which ends it too
    assert!(admission.releases.lock().unwrap()[0].has_changed().is_err());
}
