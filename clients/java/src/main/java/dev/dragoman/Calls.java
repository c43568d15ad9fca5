package dev.dragoman;

import dev.dragoman.Channels.Address;
import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** Calls of which one message is wanted: unary ones, and the first message of a stream. */
final class Calls {
  /** The longest wait for a call that does not wait for capacity. */
  static final Duration CALL_TIMEOUT = Duration.ofSeconds(30);

  /** The longest wait in the controller's queue, or for embeddings, when the request does not bound it sooner. */
  static final Duration QUEUE_TIMEOUT = Duration.ofMinutes(10);

  private final Channels channels;

  Calls(Channels channels) {
    this.channels = channels;
  }

  /** The answer of one agent. */
  <Q, R> CompletableFuture<R> askAgent(
      Address address, MethodDescriptor<Q, R> method, Q request, Duration timeout) {
    return ask(address, method, request, timeout, "agent", "see 'dragoman ps' for the agents that are up");
  }

  /** The answer of the first controller that gives one. */
  <Q, R> CompletableFuture<R> askController(
      Controllers controllers, MethodDescriptor<Q, R> method, Q request, Duration timeout) {
    long began = System.nanoTime();
    return controllers.ask(
        address -> {
          Duration left = timeout.minusNanos(System.nanoTime() - began);
          String remedy = "start one with 'dragoman up', or give its address";
          return ask(Address.of(address), method, request, left, "controller", remedy);
        });
  }

  private <Q, R> CompletableFuture<R> ask(
      Address address, MethodDescriptor<Q, R> method, Q request, Duration timeout, String whom, String remedy) {
    CompletableFuture<R> answer = new CompletableFuture<>();
    ClientCall<Q, R> call;
    try {
      call =
          channels
              .get(address)
              .newCall(method, CallOptions.DEFAULT.withDeadlineAfter(timeout.toNanos(), TimeUnit.NANOSECONDS));
    } catch (DragomanException error) {
      answer.completeExceptionally(error);
      return answer;
    }
    String name = whom + " at " + address.target();
    call.start(
        new ClientCall.Listener<R>() {
          @Override
          public void onMessage(R message) {
            answer.complete(message);
          }

          @Override
          public void onClose(Status status, Metadata trailers) {
            if (!answer.isDone()) {
              answer.completeExceptionally(failure(status, trailers, name, remedy));
            }
          }
        },
        new Metadata());
    call.request(2);
    call.sendMessage(request);
    call.halfClose();
    // A unary call is over by now; of a stream nothing more is wanted.
    boolean stream = !method.getType().serverSendsOneMessage();
    var unused =
        answer.whenComplete(
            (message, error) -> {
              if (stream || answer.isCancelled()) {
                call.cancel("nothing more is wanted", null);
              }
            });
    return answer;
  }

  private static DragomanException failure(Status status, Metadata trailers, String name, String remedy) {
    return Errors.saidByServer(trailers)
        .orElseGet(
            () ->
                switch (status.getCode()) {
                  case UNAVAILABLE -> Errors.unreachable(
                      Reason.NO_AGENT,
                      "cannot reach the " + name + ": " + Errors.plain(status) + "; " + remedy,
                      Errors.transportOf(status));
                  case DEADLINE_EXCEEDED -> new DragomanException(
                      Reason.DEADLINE_EXCEEDED, "the " + name + " did not answer in time");
                  case OK -> new DragomanException(Reason.INTERNAL, "the " + name + " ended the call without an answer");
                  default -> Errors.ofStatus(status);
                });
  }
}
