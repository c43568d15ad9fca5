package dev.dragoman;

import java.time.Duration;

/**
 * How hard a client tries.
 *
 * <p>A request of which nothing was delivered is asked for {@code maxAttempts} times in all. One that was cut in the middle is
 * pursued for {@code resumePatience} after the cut, through at most 3 resumes; for {@code refusedPatience} only while every
 * connection is refused, which is how a stopped server looks. Delays double from {@code base} up to {@code maxDelay}, each
 * shortened at random by up to a half; a delay that the server named is the least.
 *
 * @param maxAttempts how often a request is asked for before it is accepted, at least 1
 * @param base the first delay
 * @param maxDelay the longest delay
 * @param resumePatience how long a stream that was cut is pursued
 * @param refusedPatience the same while every connection is refused
 * @param budget limits the retries of one client: each costs 1, each accepted request gives back a tenth
 */
public record RetryPolicy(
    int maxAttempts,
    Duration base,
    Duration maxDelay,
    Duration resumePatience,
    Duration refusedPatience,
    double budget) {
  /** 4 attempts, delays of 0.1 s to 5 s, 30 s of patience, 5 s where connections are refused, 50 retries. */
  public static final RetryPolicy DEFAULT =
      new RetryPolicy(
          4, Duration.ofMillis(100), Duration.ofSeconds(5), Duration.ofSeconds(30), Duration.ofSeconds(5), 50);

  /** Refuses what makes no sense. */
  public RetryPolicy {
    if (maxAttempts < 1 || !(budget >= 0) || base.isNegative() || maxDelay.isNegative()) {
      throw new IllegalArgumentException("RetryPolicy: maxAttempts is at least 1, and no delay or budget is negative");
    }
  }
}
