package dev.dragoman;

import dev.dragoman.DragomanException.Transport;
import java.time.Duration;
import java.util.EnumSet;
import java.util.Optional;
import java.util.Set;

/** When a failed request is sent again, resumed or given up, and after how long. Pure: the time and chance are given. */
final class Retry {
  /** Of one stream; a limit of the protocol. */
  static final int MAX_RESUMES = 3;

  // The agent is gone, or gave the request up, and another may go on at the last cursor.
  private static final Set<Reason> RESUMABLE =
      EnumSet.of(Reason.AGENT_LOST, Reason.DEVICE_FAULT, Reason.AGENT_DRAINING, Reason.CREDIT_TIMEOUT);
  private static final Set<Reason> LOST = EnumSet.of(Reason.AGENT_LOST, Reason.DEVICE_FAULT);

  private Retry() {}

  /** What to do about a failure. */
  enum Step {
    GIVE_UP,
    /** It was refused: same request, new ticket. */
    ASK_AGAIN,
    /** It may have been running: next attempt, from the last cursor. */
    RESUME
  }

  /** What to do, and after how long. */
  record Decision(Step step, Duration delay) {}

  /**
   * Whether a refusal may be another answer later or at another agent. A resume can reach the agent it was cut from before
   * that agent has noticed the cut: the request is still under way there.
   */
  static boolean mayPass(DragomanException error, boolean resuming) {
    return error.retryable() || (resuming && error.reason() == Reason.DUPLICATE_REQUEST);
  }

  /** What the reason of a failure asks for. Accepted: the agent had started the request on this attempt. */
  static Step stepAfter(DragomanException error, boolean accepted, boolean resuming) {
    if (accepted) {
      return RESUMABLE.contains(error.reason()) ? Step.RESUME : Step.GIVE_UP;
    }
    if (LOST.contains(error.reason())) {
      return Step.RESUME;
    }
    return mayPass(error, resuming) ? Step.ASK_AGAIN : Step.GIVE_UP;
  }

  /** How long to wait after the failure number {@code numFailures}, from 1 on. Jitter is 0.5 to 1. */
  static Duration delay(RetryPolicy policy, int numFailures, DragomanException error, double jitter) {
    double longest =
        Math.min(
            policy.base().toNanos() * Math.pow(2, Math.min(numFailures - 1, 30)), (double) policy.maxDelay().toNanos());
    Duration own = Duration.ofNanos((long) (longest * jitter));
    Duration named = error.retryDelay().orElse(Duration.ZERO);
    return own.compareTo(named) < 0 ? named : own;
  }

  /** What is left of the budget of one client. */
  static final class Budget {
    // In tenths: ten successes must make one retry exactly.
    private final long capacity;
    private long left;

    Budget(double retries) {
      capacity = Math.round(retries * 10);
      left = capacity;
    }

    /** Pays for one retry; false when there is nothing left for it. */
    synchronized boolean spend() {
      if (left < 10) {
        return false;
      }
      left -= 10;
      return true;
    }

    /** Gives a tenth of a retry back. */
    synchronized void succeeded() {
      left = Math.min(capacity, left + 1);
    }
  }

  /** Owner of what has gone wrong with one generation so far. Times are of {@link System#nanoTime}. */
  static final class Pursuit {
    private final RetryPolicy policy;
    private final Optional<Long> deadline;
    private int numResumes;
    private int numFailures;
    private boolean started;
    private DragomanException cut;
    private long cutAt;
    private Long refusedSince; // since when nobody listens any more

    Pursuit(RetryPolicy policy, Optional<Long> deadline) {
      this.policy = policy;
      this.deadline = deadline;
    }

    int numResumes() {
      return numResumes;
    }

    /** What cut the stream, until it goes on. */
    Optional<DragomanException> cut() {
      return Optional.ofNullable(cut);
    }

    /** An agent accepted the request, for the first time or again. */
    void started() {
      started = true;
    }

    /** Tokens came: what went wrong before is over. */
    void flowed() {
      numFailures = 0;
      cut = null;
    }

    /** Decides; a resume is counted. Without an origin there is nothing to continue, and it is asked for again. */
    Optional<Decision> failed(DragomanException error, boolean accepted, boolean hasOrigin, long now, double jitter) {
      Step step = stepAfter(error, accepted, numResumes > 0);
      if (step == Step.RESUME && !hasOrigin) {
        step = Step.ASK_AGAIN;
      }
      if (step == Step.GIVE_UP || (step == Step.RESUME && numResumes >= MAX_RESUMES)) {
        return Optional.empty();
      }
      Optional<Duration> delay = delayBefore(error, now, jitter);
      if (delay.isEmpty()) {
        return Optional.empty();
      }
      if (step == Step.RESUME) {
        numResumes++;
      }
      return Optional.of(new Decision(step, delay.get()));
    }

    private Optional<Duration> delayBefore(DragomanException error, long now, double jitter) {
      boolean refused = error.transport() == Transport.REFUSED;
      refusedSince = !refused ? null : refusedSince == null ? Long.valueOf(now) : refusedSince;
      if (started && cut == null) {
        cut = error;
        cutAt = now;
        return Optional.of(Duration.ZERO); // the first cut is answered at once
      }
      numFailures++;
      Duration delay = delay(policy, numFailures, error, jitter);
      if (deadline.isPresent() && Duration.ofNanos(deadline.get() - now).compareTo(delay) <= 0) {
        return Optional.empty();
      }
      if (!started) {
        return numFailures < policy.maxAttempts() ? Optional.of(delay) : Optional.empty();
      }
      Duration left = policy.resumePatience().minusNanos(now - cutAt);
      if (refusedSince != null) {
        Duration leftRefused = policy.refusedPatience().minusNanos(now - refusedSince);
        left = leftRefused.compareTo(left) < 0 ? leftRefused : left;
      }
      return delay.compareTo(left) <= 0 ? Optional.of(delay) : Optional.empty();
    }
  }
}
