package dev.dragoman;

import com.google.protobuf.Duration;

/** Durations to and from the protocol. */
final class Durations {
  private Durations() {}

  /** A received duration. */
  static java.time.Duration of(Duration duration) {
    return java.time.Duration.ofSeconds(duration.getSeconds(), duration.getNanos());
  }

  /** A duration to be sent; a negative one counts as none. */
  static Duration wire(java.time.Duration duration) {
    java.time.Duration sent = duration.isNegative() ? java.time.Duration.ZERO : duration;
    return Duration.newBuilder().setSeconds(sent.getSeconds()).setNanos(sent.getNano()).build();
  }
}
