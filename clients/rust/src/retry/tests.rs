use super::*;

const MS: fn(u64) -> Duration = Duration::from_millis;

fn error(reason: Reason) -> Error {
    Error::new(reason, "it went wrong")
}

fn pursuit() -> Pursuit {
    Pursuit::new(RetryPolicy::default(), None)
}

#[test]
fn what_each_reason_asks_for() {
    let accepted_and_resumed = [
        Reason::AgentLost,
        Reason::DeviceFault,
        Reason::AgentDraining,
        Reason::CreditTimeout,
    ];
    for number in 0..36 {
        let error = error(Reason::from_number(number));
        let resumed = accepted_and_resumed.contains(&error.reason);
        assert_eq!(
            step_after(&error, true, false),
            if resumed { Step::Resume } else { Step::GiveUp },
            "{error}"
        );
        let fresh = match error.reason {
            Reason::AgentLost | Reason::DeviceFault => Step::Resume,
            _ if error.retryable() => Step::AskAgain,
            _ => Step::GiveUp,
        };
        assert_eq!(step_after(&error, false, false), fresh, "{error}");
    }
}

#[test]
fn a_duplicate_may_pass_on_a_resume_alone() {
    let duplicate = error(Reason::DuplicateRequest);
    assert_eq!(step_after(&duplicate, false, false), Step::GiveUp);
    assert_eq!(step_after(&duplicate, false, true), Step::AskAgain);
    assert_eq!(step_after(&duplicate, true, true), Step::GiveUp);
}

#[test]
fn delays_double_to_the_longest_and_heed_the_server() {
    let policy = RetryPolicy::default();
    let mut full = error(Reason::QueueFull);
    assert_eq!(policy.delay(1, &full, 1.0), MS(100));
    assert_eq!(policy.delay(3, &full, 1.0), MS(400));
    assert_eq!(policy.delay(3, &full, 0.5), MS(200));
    assert_eq!(policy.delay(60, &full, 1.0), MS(5000));
    full.retry_delay = Some(MS(7000));
    assert_eq!(policy.delay(1, &full, 0.5), MS(7000));
}

#[test]
fn a_request_of_which_nothing_came_is_asked_for_so_many_times() {
    let (mut pursuit, now) = (pursuit(), Instant::now());
    for _ in 0..3 {
        let (step, delay) = pursuit
            .failed(&error(Reason::QueueFull), false, true, now, 1.0)
            .unwrap();
        assert_eq!(step, Step::AskAgain);
        assert!(delay >= MS(100));
    }
    assert_eq!(pursuit.failed(&error(Reason::QueueFull), false, true, now, 1.0), None);
}

#[test]
fn the_first_cut_is_answered_at_once_and_at_most_three_are() {
    let (mut pursuit, now) = (pursuit(), Instant::now());
    pursuit.started();
    for resumed in 1..=3 {
        let answer = pursuit.failed(&error(Reason::AgentLost), true, true, now, 1.0);
        assert_eq!(answer, Some((Step::Resume, Duration::ZERO)));
        assert_eq!(pursuit.num_resumes, resumed);
        pursuit.flowed();
    }
    assert_eq!(pursuit.failed(&error(Reason::AgentLost), true, true, now, 1.0), None);
}

#[test]
fn a_cut_stream_is_pursued_until_patience_ends() {
    let (mut pursuit, cut_at) = (pursuit(), Instant::now());
    pursuit.started();
    pursuit
        .failed(&error(Reason::AgentLost), true, true, cut_at, 1.0)
        .unwrap();
    for _ in 0..10 {
        assert!(
            pursuit
                .failed(&error(Reason::NoAgent), false, true, cut_at + MS(24_000), 1.0)
                .is_some()
        );
    }
    assert_eq!(
        pursuit.failed(&error(Reason::NoAgent), false, true, cut_at + MS(25_001), 1.0),
        None
    );
    assert_eq!(pursuit.cut().unwrap().reason, Reason::AgentLost);
}

#[test]
fn patience_is_shorter_where_every_connection_is_refused() {
    let (mut pursuit, cut_at) = (pursuit(), Instant::now());
    let refused = Error {
        transport: Some(Transport::Refused),
        ..error(Reason::AgentLost)
    };
    pursuit.started();
    pursuit.failed(&refused, true, true, cut_at, 1.0).unwrap();
    assert!(pursuit.failed(&refused, false, true, cut_at + MS(4000), 1.0).is_some());
    assert_eq!(pursuit.failed(&refused, false, true, cut_at + MS(4900), 1.0), None);
    // One that answers in between is worth the whole patience again.
    assert!(
        pursuit
            .failed(&error(Reason::NoAgent), false, true, cut_at + MS(6000), 1.0)
            .is_some()
    );
}

#[test]
fn no_wait_ends_after_the_deadline() {
    let now = Instant::now();
    let mut pursuit = Pursuit::new(RetryPolicy::default(), Some(now + MS(90)));
    assert_eq!(pursuit.failed(&error(Reason::QueueFull), false, true, now, 1.0), None);
    let mut pursuit = Pursuit::new(RetryPolicy::default(), Some(now + MS(110)));
    assert!(
        pursuit
            .failed(&error(Reason::QueueFull), false, true, now, 1.0)
            .is_some()
    );
}

#[test]
fn without_an_agent_that_may_have_run_it_a_lost_one_is_asked_for_again() {
    let (step, _) = pursuit()
        .failed(&error(Reason::AgentLost), false, false, Instant::now(), 1.0)
        .unwrap();
    assert_eq!(step, Step::AskAgain);
}

#[test]
fn ten_successes_make_one_retry() {
    let budget = RetryBudget::new(2.0);
    assert!(budget.spend() && budget.spend() && !budget.spend());
    for _ in 0..9 {
        budget.succeeded();
    }
    assert!(!budget.spend());
    budget.succeeded();
    assert!(budget.spend() && !budget.spend());
    for _ in 0..100 {
        budget.succeeded();
    }
    assert!(
        budget.spend() && budget.spend() && !budget.spend(),
        "it never holds more than it began with"
    );
}

#[test]
fn a_policy_that_makes_no_sense_is_refused() {
    for (policy, param) in [
        (
            RetryPolicy {
                max_attempts: 0,
                ..Default::default()
            },
            "retry.max_attempts",
        ),
        (
            RetryPolicy {
                budget: -1.0,
                ..Default::default()
            },
            "retry.budget",
        ),
        (
            RetryPolicy {
                budget: f64::NAN,
                ..Default::default()
            },
            "retry.budget",
        ),
    ] {
        assert_eq!(policy.check().unwrap_err().metadata["param"], param);
    }
}
