//! When a failed request is sent again, resumed or given up, and after how long. Pure: no clock, no sleep, no random numbers.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use crate::catalogue::Reason;
use crate::errors::{Error, Transport};

/// Resumes of one stream, at most: a limit of the protocol.
pub(crate) const MAX_RESUMES: u32 = 3;
/// The budget is counted in tenths, so that ten successes make one retry exactly.
const TENTHS: i64 = 10;

/// How hard a client tries.
///
/// A request of which nothing was delivered is asked for `max_attempts` times in all. One that was cut in the middle is worth more:
/// it is pursued for `resume_patience` after the cut, through at most 3 resumes; for `refused_patience` only while every connection
/// is refused, which is how a stopped server looks. Delays double from `base_delay` up to `max_delay`, each shortened at random by up
/// to a half; a delay that the server named is the least.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryPolicy {
    /// Asks in all for a request of which nothing was delivered; at least 1.
    pub max_attempts: u32,
    /// The delay after the first failure.
    pub base_delay: Duration,
    /// The longest delay.
    pub max_delay: Duration,
    /// How long a cut stream is pursued.
    pub resume_patience: Duration,
    /// The same while every connection is refused.
    pub refused_patience: Duration,
    /// Retries of one client together: each costs 1, each accepted request gives a tenth back. Not negative.
    pub budget: f64,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            max_attempts: 4,
            base_delay: Duration::from_millis(100),
            max_delay: Duration::from_secs(5),
            resume_patience: Duration::from_secs(30),
            refused_patience: Duration::from_secs(5),
            budget: 50.0,
        }
    }
}

impl RetryPolicy {
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.max_attempts < 1 {
            return Err(Error::invalid(
                "retry.max_attempts",
                "is 0; a request is asked for at least once",
            ));
        }
        if !(self.budget >= 0.0 && self.budget.is_finite()) {
            return Err(Error::invalid(
                "retry.budget",
                format!("must be a number from 0 on, not {}", self.budget),
            ));
        }
        Ok(())
    }

    /// The wait after failure number `num_failures`, from 1 on; `jitter` is from 0.5 to 1.
    fn delay(&self, num_failures: u32, error: &Error, jitter: f64) -> Duration {
        let doubled = self.base_delay.saturating_mul(1 << (num_failures - 1).min(30));
        doubled
            .min(self.max_delay)
            .mul_f64(jitter)
            .max(error.retry_delay.unwrap_or_default())
    }
}

/// What is left of `RetryPolicy::budget`. Owned by one client.
#[derive(Debug)]
pub(crate) struct RetryBudget {
    capacity: i64,
    left: AtomicI64,
}

impl RetryBudget {
    pub(crate) fn new(budget: f64) -> Self {
        let capacity = (budget * TENTHS as f64).round() as i64;
        Self {
            capacity,
            left: AtomicI64::new(capacity),
        }
    }

    /// Pays for one retry; false when there is nothing left for it.
    pub(crate) fn spend(&self) -> bool {
        self.change(|left| (left >= TENTHS).then_some(left - TENTHS))
    }

    /// Gives a tenth of a retry back.
    pub(crate) fn succeeded(&self) {
        self.change(|left| Some(self.capacity.min(left + 1)));
    }

    fn change(&self, by: impl FnMut(i64) -> Option<i64>) -> bool {
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, by).is_ok()
    }
}

/// What to do about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    GiveUp,
    /// It was refused: same request, new ticket.
    AskAgain,
    /// It may have been running: next attempt, from the last cursor.
    Resume,
}

/// Whether a refusal may be another answer later or at another agent.
///
/// A resume can reach the agent it was cut from before that agent has noticed the cut: the request is still under way there.
pub(crate) fn may_pass(error: &Error, resuming: bool) -> bool {
    error.retryable() || (resuming && error.reason == Reason::DuplicateRequest)
}

/// What the reason of a failure asks for. `accepted`: the agent had started the request on this attempt.
pub(crate) fn step_after(error: &Error, accepted: bool, resuming: bool) -> Step {
    let lost = matches!(error.reason, Reason::AgentLost | Reason::DeviceFault);
    let handed_over = matches!(error.reason, Reason::AgentDraining | Reason::CreditTimeout);
    match accepted {
        true if lost || handed_over => Step::Resume,
        true => Step::GiveUp,
        false if lost => Step::Resume,
        false if may_pass(error, resuming) => Step::AskAgain,
        false => Step::GiveUp,
    }
}

/// Owner of what has gone wrong with one generation so far.
///
/// The first cut is answered at once. What fails after it, until tokens flow again, is answered after growing delays.
#[derive(Debug)]
pub(crate) struct Pursuit {
    policy: RetryPolicy,
    deadline: Option<Instant>,
    pub(crate) num_resumes: u32,
    was_started: bool,
    /// What cut the stream and when, until it goes on.
    cut: Option<(Error, Instant)>,
    /// Since when nobody listens any more.
    refused_since: Option<Instant>,
    num_failures: u32,
}

impl Pursuit {
    pub(crate) fn new(policy: RetryPolicy, deadline: Option<Instant>) -> Self {
        Self {
            policy,
            deadline,
            num_resumes: 0,
            was_started: false,
            cut: None,
            refused_since: None,
            num_failures: 0,
        }
    }

    /// What cut the stream, until it goes on.
    pub(crate) fn cut(&self) -> Option<&Error> {
        self.cut.as_ref().map(|(error, _)| error)
    }

    /// An agent accepted the request, for the first time or again.
    pub(crate) fn started(&mut self) {
        self.was_started = true;
    }

    /// Tokens came: what went wrong before is over.
    pub(crate) fn flowed(&mut self) {
        if self.num_failures > 0 || self.cut.is_some() {
            (self.num_failures, self.cut) = (0, None);
        }
    }

    /// What to do after which delay, `None` when it is the end; a resume is counted. `has_origin`: there is an agent that may have
    /// run it; where there is none, a lost one is answered by asking again.
    pub(crate) fn failed(
        &mut self,
        error: &Error,
        accepted: bool,
        has_origin: bool,
        now: Instant,
        jitter: f64,
    ) -> Option<(Step, Duration)> {
        let step = match step_after(error, accepted, self.num_resumes > 0) {
            Step::GiveUp => return None,
            Step::Resume if !has_origin => Step::AskAgain,
            Step::Resume if self.num_resumes >= MAX_RESUMES => return None,
            step => step,
        };
        let delay = self.delay_before(error, now, jitter)?;
        self.num_resumes += u32::from(step == Step::Resume);
        Some((step, delay))
    }

    fn delay_before(&mut self, error: &Error, now: Instant, jitter: f64) -> Option<Duration> {
        let refused = error.transport == Some(Transport::Refused);
        self.refused_since = refused.then(|| self.refused_since.unwrap_or(now));
        let cut_at = match &self.cut {
            None if self.was_started => {
                self.cut = Some((error.clone(), now));
                return Some(Duration::ZERO);
            }
            None => now,
            Some((_, at)) => *at,
        };
        self.num_failures += 1;
        let delay = self.policy.delay(self.num_failures, error, jitter);
        if self.deadline.is_some_and(|deadline| now + delay >= deadline) {
            return None;
        }
        if !self.was_started {
            return (self.num_failures < self.policy.max_attempts).then_some(delay);
        }
        let mut until = cut_at + self.policy.resume_patience;
        if let Some(since) = self.refused_since {
            until = until.min(since + self.policy.refused_patience);
        }
        (now + delay <= until).then_some(delay)
    }
}

#[cfg(test)]
mod tests;
