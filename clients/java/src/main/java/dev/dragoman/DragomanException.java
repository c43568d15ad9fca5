package dev.dragoman;

import java.time.Duration;
import java.util.Map;
import java.util.Optional;

/** A failure with a reason of the catalogue. The message says what happened, why, and what to do. */
public final class DragomanException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  /** What the connection itself said of a failure. */
  enum Transport {
    /** It was the server that spoke. */
    NONE,
    /** The server could not be reached. */
    BROKEN,
    /** Nobody listens at the address. */
    REFUSED
  }

  private final Reason reason;
  private final int number;
  private final transient Duration retryDelay;
  private final transient Map<String, String> metadata;
  private final transient Transport transport;

  DragomanException(Reason reason, String message) {
    this(reason, reason.number(), message, null, Map.of(), Transport.NONE);
  }

  DragomanException(
      Reason reason,
      int number,
      String message,
      Duration retryDelay,
      Map<String, String> metadata,
      Transport transport) {
    super(message);
    this.reason = reason;
    this.number = number;
    this.retryDelay = retryDelay;
    this.metadata = Map.copyOf(metadata);
    this.transport = transport;
  }

  /**
   * Returns why the call failed.
   *
   * @return the reason, UNKNOWN for one of a newer version
   */
  public Reason reason() {
    return reason;
  }

  /**
   * Returns the name of the reason.
   *
   * @return such as "queue_full"; of a newer version "unknown_99"
   */
  public String reasonName() {
    return reason == Reason.UNKNOWN ? "unknown_" + number : Errors.nameOf(reason);
  }

  /**
   * Tells whether the same request may succeed later or elsewhere.
   *
   * @return true where it may
   */
  public boolean retryable() {
    return reason.retryable();
  }

  /**
   * Returns the delay that the server asks for before the next try.
   *
   * @return the delay, if any
   */
  public Optional<Duration> retryDelay() {
    return Optional.ofNullable(retryDelay);
  }

  /**
   * Returns facts of the failure, such as "param", the path of the bad field.
   *
   * @return the facts
   */
  public Map<String, String> metadata() {
    return metadata == null ? Map.of() : metadata;
  }

  /**
   * Returns the canonical gRPC status code.
   *
   * @return the code
   */
  public int grpcCode() {
    return reason.grpcCode();
  }

  /**
   * Returns the HTTP status of the gateway.
   *
   * @return the status
   */
  public int httpStatus() {
    return reason.httpStatus();
  }

  Transport transport() {
    return transport == null ? Transport.NONE : transport;
  }

  /** The same failure with another message. */
  DragomanException withMessage(String message) {
    DragomanException other = new DragomanException(reason, number, message, retryDelay, metadata, transport);
    other.initCause(this);
    return other;
  }
}
