/** Seconds to and from the protocol's Duration. */

import type { Duration } from "../gen/google/protobuf/duration.js";

/** A Duration in seconds; 0 where it is not set. */
export function secondsOf(duration: Duration | undefined): number {
  return duration === undefined ? 0 : Number(duration.seconds) + duration.nanos / 1e9;
}

/** Seconds as a Duration; negative ones count as none. */
export function durationOf(seconds: number): Duration {
  const kept = Math.max(seconds, 0);
  const whole = Math.floor(kept);
  // Rounding up to a whole second would be no valid Duration.
  return { seconds: BigInt(whole), nanos: Math.min(Math.round((kept - whole) * 1e9), 999_999_999) };
}

/** Seconds of a clock that only moves forward. */
export function monotonicSeconds(): number {
  return performance.now() / 1000;
}
