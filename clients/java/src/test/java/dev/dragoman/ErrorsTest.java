package dev.dragoman;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.dragoman.DragomanException.Transport;
import dev.dragoman.v1.ErrorDetail;
import dev.dragoman.v1.ErrorReason;
import dev.dragoman.v1.ErrorTraits;
import io.grpc.Metadata;
import io.grpc.Status;
import java.io.IOException;
import java.net.ConnectException;
import java.time.Duration;
import java.util.Map;
import java.util.Optional;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

final class ErrorsTest {
  @ParameterizedTest
  @EnumSource(value = Reason.class, mode = EnumSource.Mode.EXCLUDE, names = "UNKNOWN")
  void theTableIsTheCatalogue(Reason reason) {
    ErrorReason wire = ErrorReason.forNumber(reason.number());
    assertEquals("ERROR_REASON_" + reason.name(), wire.name());
    ErrorTraits traits = wire.getValueDescriptor().getOptions().getExtension(dev.dragoman.v1.Error.traits);
    assertEquals(traits.getGrpcCode(), reason.grpcCode());
    assertEquals(traits.getHttpStatus(), reason.httpStatus());
    assertEquals(traits.getRetryable(), reason.retryable());
    assertEquals(traits.getRemedy(), reason.remedy());
    assertSame(reason, Reason.fromNumber(reason.number()));
  }

  @Test
  void everyReasonIsInTheTable() {
    for (ErrorReason wire : ErrorReason.values()) {
      assertTrue(wire == ErrorReason.UNRECOGNIZED || Reason.fromNumber(wire.getNumber()) != Reason.UNKNOWN);
    }
  }

  @Test
  void theServersOwnWordComesFromTheTrailers() {
    ErrorDetail detail =
        ErrorDetail.newBuilder()
            .setReason(ErrorReason.ERROR_REASON_QUEUE_FULL)
            .setMessage("64 wait")
            .setRetryDelay(com.google.protobuf.Duration.newBuilder().setSeconds(1).setNanos(500_000_000))
            .putMetadata("limit", "64")
            .build();
    Metadata trailers = new Metadata();
    trailers.put(Errors.DETAIL, detail.toByteArray());
    DragomanException error = Errors.saidByServer(trailers).orElseThrow();
    assertEquals(Reason.QUEUE_FULL, error.reason());
    assertEquals("queue_full", error.reasonName());
    assertEquals("64 wait", error.getMessage());
    assertEquals(Optional.of(Duration.ofMillis(1500)), error.retryDelay());
    assertEquals(Map.of("limit", "64"), error.metadata());
    assertEquals(429, error.httpStatus());
    assertEquals(Optional.empty(), Errors.saidByServer(new Metadata()));
  }

  @Test
  void aReasonOfANewerVersionIsNamedByItsNumber() {
    DragomanException error = Errors.ofDetail(ErrorDetail.newBuilder().setReasonValue(99).build());
    assertEquals("unknown_99", error.reasonName());
    assertFalse(error.retryable());
    assertEquals(500, error.httpStatus());
    assertEquals("unknown_99", error.withMessage("again").reasonName());
  }

  @Test
  void aDetailThatCannotBeRead() {
    Metadata trailers = new Metadata();
    trailers.put(Errors.DETAIL, new byte[] {(byte) 0xff});
    assertEquals(Reason.INTERNAL, Errors.saidByServer(trailers).orElseThrow().reason());
  }

  @Test
  void theNearestReasonOfAStatus() {
    assertEquals(Reason.PERMISSION_DENIED, Errors.ofStatus(Status.PERMISSION_DENIED).reason());
    assertEquals(Reason.REQUEST_TOO_LARGE, Errors.ofStatus(Status.RESOURCE_EXHAUSTED).reason());
    DragomanException other = Errors.ofStatus(Status.DATA_LOSS.withDescription("gone"));
    assertEquals(Reason.INTERNAL, other.reason());
    assertEquals("gone", other.getMessage());
    assertEquals("DATA_LOSS", Errors.ofStatus(Status.DATA_LOSS).getMessage());
  }

  @Test
  void whatTheTransportSays() {
    Status refused =
        Status.UNAVAILABLE.withCause(new IOException(new ConnectException("Connection refused: /127.0.0.1:1")));
    assertEquals("connection refused", Errors.plain(refused));
    assertEquals(Transport.REFUSED, Errors.transportOf(refused));
    Status handshake = Status.UNAVAILABLE.withDescription("io exception").withCause(new IOException("bad certificate"));
    assertEquals("bad certificate", Errors.plain(handshake));
    assertEquals(Transport.BROKEN, Errors.transportOf(handshake));
    assertEquals("UNAVAILABLE", Errors.plain(Status.UNAVAILABLE));
  }
}
