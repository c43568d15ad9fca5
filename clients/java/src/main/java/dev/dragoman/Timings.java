package dev.dragoman;

import java.time.Duration;
import java.util.Optional;

/**
 * How long a generation took, as the client saw it: from its call on, with admission and resumes.
 *
 * @param timeToFirstToken until the first token, absent where none came
 * @param total until the end
 * @param agent what the finishing agent says, from acceptance on; absent where it did not say
 */
public record Timings(Optional<Duration> timeToFirstToken, Duration total, Optional<Agent> agent) {
  /**
   * The finishing agent's own figures, from acceptance on.
   *
   * @param queue until the first step that computed for it
   * @param timeToFirstToken until the first token
   * @param total until the end
   */
  public record Agent(Duration queue, Duration timeToFirstToken, Duration total) {}
}
