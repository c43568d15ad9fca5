package dev.dragoman;

import dev.dragoman.v1.LatencyEstimate;
import java.time.Duration;

/**
 * One prediction: the middle, and the interval that holds eight in ten outcomes.
 *
 * @param expected the middle
 * @param p10 one in ten is below
 * @param p90 one in ten is above
 */
public record Estimate(Duration expected, Duration p10, Duration p90) {
  static Estimate of(LatencyEstimate estimate) {
    return new Estimate(
        Durations.of(estimate.getExpected()), Durations.of(estimate.getP10()), Durations.of(estimate.getP90()));
  }
}
