package dev.dragoman;

import dev.dragoman.Channels.Address;
import dev.dragoman.DragomanException.Transport;
import dev.dragoman.v1.GenerateRequest;
import dev.dragoman.v1.GenerateResponse;
import dev.dragoman.v1.GenerationServiceGrpc;
import dev.dragoman.v1.GenerationStarted;
import dev.dragoman.v1.Ticket;
import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.Status;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.TimeUnit;

/** One stream at one agent: opened with a ticket, accepted, read to its one end. Knows nothing of retries. */
final class Attempt extends ClientCall.Listener<GenerateResponse> {
  /** Who follows the stream. Called on a thread of gRPC, one call after the other. */
  interface Follower {
    void message(Attempt attempt, GenerateResponse response);

    void closed(Attempt attempt, DragomanException error);
  }

  // The agent ends a request at its deadline by itself, with a reason; the transport cuts it this much later.
  private static final Duration DEADLINE_SLACK = Duration.ofMillis(500);

  private final Ticket ticket;
  private final Follower follower;
  private final ClientCall<GenerateRequest, GenerateResponse> call;

  private Attempt(Ticket ticket, Follower follower, ClientCall<GenerateRequest, GenerateResponse> call) {
    this.ticket = ticket;
    this.follower = follower;
    this.call = call;
  }

  /** Sends the request. The first message that comes is to be given to {@code accept}. */
  static Attempt open(
      Channels channels, Ticket ticket, GenerateRequest request, Optional<Duration> remaining, Follower follower) {
    GenerateRequest.Builder sent = request.toBuilder().setTicketToken(ticket.getToken());
    CallOptions options = CallOptions.DEFAULT;
    if (remaining.isPresent()) {
      sent.setDeadline(Durations.wire(remaining.get()));
      options = options.withDeadlineAfter(remaining.get().plus(DEADLINE_SLACK).toNanos(), TimeUnit.NANOSECONDS);
    }
    Address address = new Address(ticket.getDataAddress(), ticket.getAgentId());
    var call = channels.get(address).newCall(GenerationServiceGrpc.getGenerateMethod(), options);
    Attempt attempt = new Attempt(ticket, follower, call);
    call.start(attempt, new Metadata());
    call.request(1);
    call.sendMessage(sent.build());
    call.halfClose();
    return attempt;
  }

  Ticket ticket() {
    return ticket;
  }

  /** Asks for so many messages more. */
  void request(int numMessages) {
    call.request(numMessages);
  }

  /** Cancels the request at the agent. */
  void cancel() {
    call.cancel("left by the client", null);
  }

  /** Reads the first message: the request was accepted. Throws where it was not, by this life of the agent. */
  GenerationStarted accept(GenerateResponse response) {
    if (response.hasFailed()) {
      throw Errors.ofDetail(response.getFailed().getError());
    }
    if (!response.hasStarted()) {
      throw lost("sent tokens before it accepted the request");
    }
    if (ticket.getEpoch() != 0 && ticket.getEpoch() != response.getStarted().getEpoch()) {
      throw lost("is in another life than the ticket is for");
    }
    return response.getStarted();
  }

  /** Why a message that is neither tokens nor the end is the end of this attempt. */
  DragomanException misplaced(GenerateResponse response) {
    return switch (response.getEventCase()) {
      case FAILED -> Errors.ofDetail(response.getFailed().getError());
      // A second start is the agent's next life, or another one behind the same address.
      case STARTED -> lost("started the request a second time");
      default -> lost("sent an event that this version does not know");
    };
  }

  /** The error of an agent that can no longer be trusted with this stream. */
  DragomanException lost(String what) {
    return lost(what, Transport.NONE);
  }

  private DragomanException lost(String what, Transport transport) {
    String name = ticket.getAgentId().isEmpty() ? "at " : ticket.getAgentId() + " at ";
    return Errors.unreachable(
        Reason.AGENT_LOST, "the agent " + name + ticket.getDataAddress() + " " + what, transport);
  }

  @Override
  public void onMessage(GenerateResponse message) {
    follower.message(this, message);
  }

  @Override
  public void onClose(Status status, Metadata trailers) {
    follower.closed(this, Errors.saidByServer(trailers).orElseGet(() -> failure(status)));
  }

  private DragomanException failure(Status status) {
    return switch (status.getCode()) {
      case OK -> lost("ended the stream without saying how the request ended");
      // In these a connection or a process that went away shows itself.
      case UNAVAILABLE, CANCELLED, UNKNOWN, INTERNAL -> lost(
          "cannot be reached: " + Errors.plain(status),
          // an open agent is the only one there is
          ticket.getAgentId().isEmpty() ? Errors.transportOf(status) : Transport.NONE);
      case DEADLINE_EXCEEDED -> Errors.deadlinePassed();
      default -> Errors.ofStatus(status);
    };
  }
}
