package dev.dragoman;

import com.google.protobuf.InvalidProtocolBufferException;
import dev.dragoman.DragomanException.Transport;
import dev.dragoman.v1.ErrorDetail;
import io.grpc.Metadata;
import io.grpc.Status;
import java.net.ConnectException;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletionException;
import java.util.concurrent.TimeoutException;

/** From what the wire says to exceptions of the catalogue. */
final class Errors {
  static final Metadata.Key<byte[]> DETAIL = Metadata.Key.of("dragoman-error-bin", Metadata.BINARY_BYTE_MARSHALLER);
  private static final String REFUSED = "connection refused";

  private Errors() {}

  static String nameOf(Reason reason) {
    return reason.name().toLowerCase(Locale.ROOT);
  }

  /** A bad argument. */
  static DragomanException invalid(String param, String message) {
    return new DragomanException(
        Reason.INVALID_REQUEST,
        Reason.INVALID_REQUEST.number(),
        param + ": " + message,
        null,
        Map.of("param", param),
        Transport.NONE);
  }

  static DragomanException deadlinePassed() {
    return new DragomanException(Reason.DEADLINE_EXCEEDED, "the deadline of the request passed");
  }

  static DragomanException closed() {
    return new DragomanException(Reason.CANCELLED, "the stream was closed before its end");
  }

  static DragomanException internal(Throwable error) {
    DragomanException failure = new DragomanException(Reason.INTERNAL, "the client failed: " + error);
    failure.initCause(error);
    return failure;
  }

  /** The failure of a future. */
  static DragomanException of(Throwable error) {
    Throwable plain = error instanceof CompletionException && error.getCause() != null ? error.getCause() : error;
    if (plain instanceof DragomanException failure) {
      return failure;
    }
    return plain instanceof TimeoutException ? deadlinePassed() : internal(plain);
  }

  /** The end of a stream that had been cut: what cut it comes first. */
  static DragomanException notResumed(DragomanException cut, DragomanException error) {
    return error.withMessage(
        "the stream was cut (" + cut.getMessage() + ") and could not be resumed: " + error.getMessage());
  }

  /** The failure that a received detail tells. */
  static DragomanException ofDetail(ErrorDetail detail) {
    return new DragomanException(
        Reason.fromNumber(detail.getReasonValue()),
        detail.getReasonValue(),
        detail.getMessage(),
        detail.hasRetryDelay() ? Durations.of(detail.getRetryDelay()) : null,
        detail.getMetadataMap(),
        Transport.NONE);
  }

  /** The server's own word, where it has one. */
  static Optional<DragomanException> saidByServer(Metadata trailers) {
    byte[] bytes = trailers.get(DETAIL);
    if (bytes == null) {
      return Optional.empty();
    }
    try {
      return Optional.of(ofDetail(ErrorDetail.parseFrom(bytes)));
    } catch (InvalidProtocolBufferException error) {
      return Optional.of(new DragomanException(Reason.INTERNAL, "the server sent an error that cannot be read"));
    }
  }

  /** The nearest reason of a status without a detail. */
  static DragomanException ofStatus(Status status) {
    Reason reason =
        switch (status.getCode()) {
          case CANCELLED -> Reason.CANCELLED;
          case DEADLINE_EXCEEDED -> Reason.DEADLINE_EXCEEDED;
          case INVALID_ARGUMENT -> Reason.INVALID_REQUEST;
          case UNIMPLEMENTED -> Reason.UNIMPLEMENTED;
          case UNAVAILABLE -> Reason.AGENT_LOST;
          case RESOURCE_EXHAUSTED -> Reason.REQUEST_TOO_LARGE;
          case UNAUTHENTICATED -> Reason.INVALID_API_KEY;
          case PERMISSION_DENIED -> Reason.PERMISSION_DENIED;
          case NOT_FOUND -> Reason.MODEL_NOT_SERVED;
          default -> Reason.INTERNAL;
        };
    String text = status.getDescription();
    return new DragomanException(reason, text == null || text.isEmpty() ? status.getCode().name() : text);
  }

  /** A failure that the transport made, with what it says. */
  static DragomanException unreachable(Reason reason, String message, Transport transport) {
    return new DragomanException(reason, reason.number(), message, null, Map.of(), transport);
  }

  /** Whether nobody listens at the address. */
  static Transport transportOf(Status status) {
    for (Throwable cause = status.getCause(); cause != null; cause = cause.getCause()) {
      if (cause instanceof ConnectException && String.valueOf(cause.getMessage()).contains("refused")) {
        return Transport.REFUSED;
      }
    }
    return Transport.BROKEN;
  }

  /** What the transport says, without the layers that are wrapped around it. */
  static String plain(Status status) {
    if (transportOf(status) == Transport.REFUSED) {
      return REFUSED;
    }
    String text = status.getDescription();
    for (Throwable cause = status.getCause(); cause != null; cause = cause.getCause()) {
      text = cause.getMessage() == null ? text : cause.getMessage();
    }
    return text == null || text.isEmpty() ? status.getCode().name() : text;
  }
}
