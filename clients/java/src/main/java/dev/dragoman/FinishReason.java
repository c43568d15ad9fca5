package dev.dragoman;

/** Why a choice ended. */
public enum FinishReason {
  /** A stop token or a stop string; also a reason that this version does not know. */
  STOP,
  /** The token budget or the end of the context. */
  LENGTH,
  /** It was cancelled. */
  CANCELLED;

  static FinishReason of(dev.dragoman.v1.FinishReason reason) {
    return switch (reason) {
      case FINISH_REASON_LENGTH -> LENGTH;
      case FINISH_REASON_CANCELLED -> CANCELLED;
      default -> STOP;
    };
  }
}
