use std::cell::RefCell;

use super::*;
use crate::errors::Transport;

fn away() -> Error {
    Error {
        transport: Some(Transport::Refused),
        ..Error::new(Reason::NoAgent, "nobody there")
    }
}

/// Asks; `answers` says what each target does. Gives the answer and who was asked.
async fn asked(
    controllers: &Controllers,
    answers: impl Fn(&str) -> Result<u32, Error>,
) -> (Result<u32, Error>, Vec<String>) {
    let seen = RefCell::new(Vec::new());
    let answer = controllers
        .ask(|address| {
            seen.borrow_mut().push(address.target.clone());
            std::future::ready(answers(&address.target))
        })
        .await;
    (answer, seen.into_inner())
}

#[tokio::test(flavor = "current_thread")]
async fn one_that_is_away_is_passed_over_and_not_asked_again() {
    let controllers = Controllers::new(" a:1, b:2 ,a:1").unwrap();
    let first_is_away = |target: &str| if target == "a:1" { Err(away()) } else { Ok(7) };
    let (answer, seen) = asked(&controllers, first_is_away).await;
    assert_eq!((answer.unwrap(), seen), (7, vec!["a:1".to_owned(), "b:2".to_owned()]));
    assert_eq!(asked(&controllers, first_is_away).await.1, ["b:2"]);
}

#[tokio::test(flavor = "current_thread")]
async fn one_that_shuts_down_is_passed_over_too_and_a_refusal_is_an_answer() {
    let draining = |target: &str| match target {
        "a:1" => Err(Error::new(Reason::AgentDraining, "shutting down")),
        _ => Err(Error::new(Reason::QueueFull, "full")),
    };
    let (answer, seen) = asked(&Controllers::new("a:1,b:2,c:3").unwrap(), draining).await;
    assert_eq!((answer.unwrap_err().reason, seen.len()), (Reason::QueueFull, 2));
}

#[tokio::test(flavor = "current_thread")]
async fn each_is_asked_once_where_all_are_away() {
    let (answer, seen) = asked(&Controllers::new("a:1,b:2,c:3").unwrap(), |_| Err(away())).await;
    assert_eq!(
        (answer.unwrap_err().reason, seen),
        (
            Reason::NoAgent,
            vec!["a:1".to_owned(), "b:2".to_owned(), "c:3".to_owned()]
        )
    );
}

#[test]
fn an_empty_list_is_an_error() {
    assert_eq!(Controllers::new(" , ").unwrap_err().metadata["param"], "controller");
}
