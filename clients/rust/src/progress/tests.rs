use super::*;
use crate::results::FinishReason;

fn delta(cursor: u64, token_ids: &[u32]) -> v1::GenerationDelta {
    v1::GenerationDelta {
        cursor,
        token_ids: token_ids.to_vec(),
        text: "x".repeat(token_ids.len()),
        ..Default::default()
    }
}

fn last(cursor: u64, token_ids: &[u32]) -> v1::GenerationDelta {
    let finish = v1::ChoiceFinish {
        reason: 1,
        stop: Some(Stop::StopString("END".to_owned())),
    };
    v1::GenerationDelta {
        finish: Some(finish),
        ..delta(cursor, token_ids)
    }
}

#[test]
fn deltas_that_follow_each_other_are_taken() {
    let mut progress = Progress::new(1);
    assert_eq!(progress.take(delta(0, &[1, 2])).unwrap().unwrap().cursor, 0);
    let token = progress.take(last(2, &[3])).unwrap().unwrap();
    assert_eq!((token.cursor, token.finish_reason), (2, Some(FinishReason::Stop)));
    assert!(progress.complete());
    let choices = progress.into_choices();
    assert_eq!(
        (choices[0].token_ids.as_slice(), choices[0].text.as_str()),
        (&[1, 2, 3][..], "xxx")
    );
    assert_eq!(choices[0].stop_string.as_deref(), Some("END"));
}

#[test]
fn what_was_delivered_is_dropped_when_it_comes_again() {
    let mut progress = Progress::new(1);
    progress.take(delta(0, &[1, 2])).unwrap();
    for again in [delta(0, &[1]), delta(0, &[1, 2]), delta(1, &[2])] {
        assert_eq!(progress.take(again), Ok(None));
    }
    progress.take(last(2, &[])).unwrap().unwrap();
    assert_eq!(progress.take(last(2, &[])), Ok(None), "the end may come again too");
    assert_eq!(progress.num_tokens(), 2);
}

#[test]
fn what_does_not_fit_is_not_taken() {
    let mut progress = Progress::new(2);
    progress.take(last(0, &[1, 2])).unwrap();
    progress
        .take(v1::GenerationDelta {
            choice_index: 1,
            ..delta(0, &[7])
        })
        .unwrap();
    for (misfit, said) in [
        (delta(2, &[3]), "after its end"),
        (delta(5, &[3]), "cursor 5 came where 2 is next"),
        (delta(u64::MAX, &[3]), "came where 2 is next"),
        (
            v1::GenerationDelta {
                choice_index: 1,
                ..delta(0, &[7, 8])
            },
            "choice 1: cursor 0 came where 1 is next",
        ),
        (
            v1::GenerationDelta {
                choice_index: 2,
                ..delta(0, &[3])
            },
            "choice 2 was not asked for",
        ),
    ] {
        let problem = progress.take(misfit).unwrap_err();
        assert!(problem.contains(said), "{problem}");
    }
    assert_eq!(progress.num_tokens(), 3);
}

#[test]
fn a_resume_tells_all_that_was_delivered() {
    let mut progress = Progress::new(2);
    progress.take(last(0, &[1, 2])).unwrap();
    let state = progress.resume_state(2, 77, 9);
    assert_eq!((state.attempt, state.origin_epoch, state.seed), (2, 77, 9));
    assert_eq!(state.choices[0].token_ids.as_ref().unwrap().ids, [1, 2]);
    assert!(state.choices[0].finish.is_some() && state.choices[1].finish.is_none());
    assert_eq!(state.choices[1].choice_index, 1);
}
