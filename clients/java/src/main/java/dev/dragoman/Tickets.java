package dev.dragoman;

import dev.dragoman.v1.AcquireTicketRequest;
import dev.dragoman.v1.AcquireTicketResponse;
import dev.dragoman.v1.AdmissionServiceGrpc;
import dev.dragoman.v1.LatencyQuote;
import dev.dragoman.v1.ReleaseTicketRequest;
import dev.dragoman.v1.Ticket;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** Where a request may go: tickets from a controller, or one open agent that takes requests without. */
interface Tickets {
  /** Tickets in the order in which they are to be tried. */
  record Grant(List<Ticket> tickets, Optional<LatencyQuote> quote) {}

  /** Waits for capacity. */
  CompletableFuture<Grant> acquire(AcquireTicketRequest request, Duration timeout);

  /** Returns a ticket that was not used, in the background; one that cannot be returned expires by itself. */
  void release(Ticket ticket);

  /** Done once the tickets now on their way are back. */
  CompletableFuture<Void> returned();

  /** One agent that was started with --open: every request goes to it, without a ticket. */
  record OpenAgent(String target) implements Tickets {
    @Override
    public CompletableFuture<Grant> acquire(AcquireTicketRequest request, Duration timeout) {
      Ticket ticket = Ticket.newBuilder().setDataAddress(target).build();
      return CompletableFuture.completedFuture(new Grant(List.of(ticket), Optional.empty()));
    }

    @Override
    public void release(Ticket ticket) {
      // there is nothing to return
    }

    @Override
    public CompletableFuture<Void> returned() {
      return CompletableFuture.completedFuture(null);
    }
  }

  /** Tickets from the controllers of a cell. Owner of those on their way back. */
  final class OfControllers implements Tickets {
    private final Calls calls;
    private final Controllers controllers;
    private final List<CompletableFuture<?>> releases = new ArrayList<>();

    OfControllers(Calls calls, Controllers controllers) {
      this.calls = calls;
      this.controllers = controllers;
    }

    @Override
    public CompletableFuture<Grant> acquire(AcquireTicketRequest request, Duration timeout) {
      long began = System.nanoTime();
      Chained<Grant> grant = new Chained<>();
      // Until a ticket is back, asking again gives the same one.
      CompletableFuture<Void> before =
          returned().completeOnTimeout(null, Math.max(1, timeout.toNanos()), TimeUnit.NANOSECONDS);
      grant.follow(before, (nothing, ignored) -> ask(request, timeout.minusNanos(System.nanoTime() - began), grant));
      return grant;
    }

    private void ask(AcquireTicketRequest request, Duration timeout, Chained<Grant> grant) {
      CompletableFuture<AcquireTicketResponse> asked =
          calls.askController(controllers, AdmissionServiceGrpc.getAcquireTicketMethod(), request, timeout);
      grant.follow(
          asked,
          (granted, error) -> {
            if (error != null) {
              grant.completeExceptionally(error);
            } else {
              grant.complete(read(granted));
            }
          });
    }

    private static Grant read(AcquireTicketResponse granted) {
      List<Ticket> tickets =
          granted.hasFallbackTicket()
              ? List.of(granted.getTicket(), granted.getFallbackTicket())
              : List.of(granted.getTicket());
      return new Grant(tickets, granted.hasQuote() ? Optional.of(granted.getQuote()) : Optional.empty());
    }

    @Override
    public void release(Ticket ticket) {
      ReleaseTicketRequest request = ReleaseTicketRequest.newBuilder().setToken(ticket.getToken()).build();
      CompletableFuture<?> release =
          calls.askController(
              controllers, AdmissionServiceGrpc.getReleaseTicketMethod(), request, Calls.CALL_TIMEOUT);
      synchronized (releases) {
        releases.add(release);
      }
      var unused =
          release.whenComplete(
              (answer, error) -> {
                synchronized (releases) {
                  releases.removeIf(other -> other == release);
                }
              });
    }

    @Override
    public CompletableFuture<Void> returned() {
      CompletableFuture<?>[] pending;
      synchronized (releases) {
        pending = releases.toArray(CompletableFuture<?>[]::new);
      }
      return CompletableFuture.allOf(pending).exceptionally(error -> null);
    }
  }
}
