package dev.dragoman;

import dev.dragoman.Requests.Prepared;
import dev.dragoman.Retry.Pursuit;
import dev.dragoman.Tickets.Grant;
import dev.dragoman.v1.AcquireTicketRequest;
import dev.dragoman.v1.GenerateRequest;
import dev.dragoman.v1.GenerateResponse;
import dev.dragoman.v1.GenerationStarted;
import dev.dragoman.v1.Ticket;
import io.grpc.SynchronizationContext;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import java.util.function.Supplier;

/**
 * One generation as the client follows it: admission, an agent's stream, fallback, resume at the last cursor, one end. Owner of
 * its state, which is changed by one event after the other, whatever thread brings it; nothing here waits.
 */
final class Generation implements Attempt.Follower {
  /** Who takes the tokens. Called one call after the other, and not to wait. */
  interface Reader {
    void token(Token token);

    /** After the last token. Without an error, the result is there. */
    void ended(Optional<DragomanException> error);
  }

  /** What a client shares with its streams. */
  record Context(Channels channels, Tickets tickets, RetryPolicy policy, Retry.Budget budget) {}

  // How many messages are asked for ahead of the reader, at most.
  private static final int MAX_AHEAD = 64;

  private final Context context;
  private final Supplier<CompletableFuture<Prepared>> prepare;
  private final Optional<Long> seedGiven;
  private final Received received = new Received();
  private final Optional<Long> deadline;
  private final Pursuit pursuit;
  private final CompletableFuture<GenerationResult> outcome = new CompletableFuture<>();
  private final SynchronizationContext serial =
      new SynchronizationContext((thread, error) -> end(Optional.of(Errors.internal(error))));

  private Reader reader;
  private boolean begun;
  private boolean over;
  private long demand;
  private CompletableFuture<?> step; // under way before an agent is asked
  private Prepared request;
  private Grant grant;
  private int grantIndex;
  private DragomanException firstRefusal;
  private Attempt attempt;
  private boolean accepted;
  private long numAsked; // messages asked for that have not come
  private Ticket origin; // where the stream was cut

  // Read from any thread.
  private volatile Optional<String> requestId = Optional.empty();
  private volatile Optional<Ticket> ticket = Optional.empty();
  private volatile Optional<Quote> quote = Optional.empty();
  private volatile int numResumes;

  Generation(
      Context context,
      Supplier<CompletableFuture<Prepared>> prepare,
      Optional<Duration> deadline,
      Optional<Long> seedGiven) {
    this.context = context;
    this.prepare = prepare;
    this.seedGiven = seedGiven;
    this.deadline = deadline.map(limit -> received.began() + limit.toNanos());
    this.pursuit = new Pursuit(context.policy(), this.deadline);
  }

  Optional<String> requestId() {
    return requestId;
  }

  Optional<Ticket> ticket() {
    return ticket;
  }

  Optional<Quote> quote() {
    return quote;
  }

  int numResumes() {
    return numResumes;
  }

  CompletableFuture<GenerationResult> outcome() {
    return outcome;
  }

  /** To be called before tokens are requested. */
  void readBy(Reader taker) {
    serial.execute(
        () -> {
          reader = taker;
          if (over) {
            taker.ended(Optional.of(Errors.closed()));
          }
        });
  }

  /** The reader is ready for so many tokens more. The first call starts the request. */
  void request(long numTokens) {
    serial.execute(
        () -> {
          demand = demand + numTokens < 0 ? Long.MAX_VALUE : demand + numTokens;
          if (over) {
            return;
          }
          if (!begun) {
            begun = true;
            start();
          } else {
            pump();
          }
        });
  }

  /** Cancels what still runs. */
  void cancel() {
    serial.execute(
        () -> {
          if (!over) {
            end(Optional.of(Errors.closed()));
          }
        });
  }

  /** Has the request admitted and accepted, once it is made. */
  private void start() {
    Optional<Duration> left = remaining();
    if (left.isPresent() && left.get().isNegative()) {
      recover(Errors.deadlinePassed(), false);
    } else if (request == null) {
      // What is asked before the request can be made is bounded by the deadline, too.
      long limit = left.orElse(Calls.QUEUE_TIMEOUT).toNanos();
      await(
          prepare.get().orTimeout(limit, TimeUnit.NANOSECONDS),
          made -> {
            request = made;
            requestId = Optional.of(made.generate().getRequestId());
            received.expect(made.generate().getSampling().getNumChoices());
            start();
          });
    } else {
      AcquireTicketRequest message =
          request.acquire(left, Optional.ofNullable(origin), pursuit.numResumes(), received.numTokens());
      await(
          context.tickets().acquire(message, left.orElse(Calls.QUEUE_TIMEOUT)),
          granted -> {
            grant = granted;
            grantIndex = 0;
            firstRefusal = null;
            if (quote.isEmpty()) {
              quote = granted.quote().map(said -> Quote.of(said, granted.tickets().get(0).getAgentId()));
            }
            open();
          });
    }
  }

  /** Goes on with what a call gave, unless the stream has ended meanwhile. */
  private <R> void await(CompletableFuture<R> call, Consumer<R> next) {
    step = call;
    var unused =
        call.whenComplete(
            (value, error) ->
                serial.execute(
                    () -> {
                      if (over || step != call) {
                        return;
                      }
                      step = null;
                      if (error == null) {
                        next.accept(value);
                      } else {
                        recover(Errors.of(error), false);
                      }
                    }));
  }

  /** Sends the request to the agent of the ticket whose turn it is. */
  private void open() {
    Ticket next = grant.tickets().get(grantIndex);
    ticket = Optional.of(next);
    accepted = false;
    numAsked = 1;
    Optional<Duration> left = remaining();
    if (left.isPresent() && left.get().isNegative()) {
      refused(next, Errors.deadlinePassed());
      return;
    }
    try {
      attempt = Attempt.open(context.channels(), next, generateMessage(), left, this);
    } catch (DragomanException error) {
      refused(next, error);
    }
  }

  @Override
  public void message(Attempt from, GenerateResponse response) {
    serial.execute(
        () -> {
          if (from == attempt && !over) {
            numAsked--;
            take(response);
          }
        });
  }

  @Override
  public void closed(Attempt from, DragomanException error) {
    serial.execute(
        () -> {
          if (from == attempt && !over) {
            lost(error);
          }
        });
  }

  private void take(GenerateResponse response) {
    try {
      if (!accepted) {
        started(attempt.accept(response));
      } else if (received.complete()) {
        // All tokens are here: what comes now is wanted for its figures only.
        received.finished(response.getFinished());
        end(Optional.empty());
        return;
      } else if (response.hasDelta()) {
        deliver(response);
      } else if (response.hasFinished()) {
        throw attempt.lost("finished the request before all its choices had ended");
      } else {
        throw attempt.misplaced(response);
      }
    } catch (DragomanException error) {
      lost(error);
      return;
    }
    pump();
  }

  private void started(GenerationStarted start) {
    accepted = true;
    received.started(start);
    pursuit.started();
    context.budget().succeeded();
  }

  private void deliver(GenerateResponse response) {
    Optional<Token> token;
    try {
      token = received.take(response.getDelta());
    } catch (Progress.MisfitException error) {
      throw attempt.lost("sent a frame that does not fit: " + error.getMessage());
    }
    if (token.isPresent()) {
      pursuit.flowed();
      demand--;
      reader.token(token.get());
    }
  }

  /** Asks for as many messages as the reader is ready for, some ahead; after the last token, for the end. */
  private void pump() {
    if (over || attempt == null || !accepted) {
      return;
    }
    long wanted = received.complete() ? 1 : Math.min(demand, MAX_AHEAD);
    if (wanted > 0 && numAsked <= wanted / 2) {
      attempt.request((int) (wanted - numAsked));
      numAsked = wanted;
    }
  }

  /** The attempt has failed: refused, or cut. */
  private void lost(DragomanException error) {
    if (received.complete()) {
      end(Optional.empty()); // it costs only the figures
      return;
    }
    Attempt failed = attempt;
    dropAttempt();
    if (accepted) {
      recover(error, true);
    } else {
      refused(failed.ticket(), error);
    }
  }

  private void refused(Ticket unused, DragomanException error) {
    context.tickets().release(unused);
    firstRefusal = firstRefusal == null ? error : firstRefusal;
    if (!Retry.mayPass(error, origin != null)) {
      recover(error, false);
    } else if (++grantIndex < grant.tickets().size()) {
      open();
    } else {
      recover(firstRefusal, false);
    }
  }

  /** Tries again after a while, or makes the error the end of the stream. */
  private void recover(DragomanException error, boolean wasAccepted) {
    Optional<DragomanException> cut = pursuit.cut();
    double jitter = ThreadLocalRandom.current().nextDouble(0.5, 1.0);
    Optional<Retry.Decision> decision =
        pursuit.failed(error, wasAccepted, ticket.isPresent(), System.nanoTime(), jitter);
    if (decision.isEmpty() || !context.budget().spend()) {
      end(Optional.of(cut.map(first -> Errors.notResumed(first, error)).orElse(error)));
      return;
    }
    if (decision.get().step() == Retry.Step.RESUME) {
      origin = ticket.orElseThrow();
      numResumes = pursuit.numResumes();
    }
    Duration delay = decision.get().delay();
    await(
        new CompletableFuture<Void>().completeOnTimeout(null, delay.toNanos(), TimeUnit.NANOSECONDS),
        nothing -> start());
  }

  private GenerateRequest generateMessage() {
    return origin == null
        ? request.generate()
        : request.generate().toBuilder()
            .setResume(received.resumeState(pursuit.numResumes(), origin.getEpoch(), seedGiven))
            .build();
  }

  private Optional<Duration> remaining() {
    return deadline.map(at -> Duration.ofNanos(at - System.nanoTime() - 1));
  }

  private void end(Optional<DragomanException> error) {
    if (over) {
      return;
    }
    over = true;
    if (step != null) {
      step.cancel(false);
    }
    boolean unused = attempt != null && !accepted;
    dropAttempt();
    if (unused) {
      context.tickets().release(ticket.orElseThrow());
    }
    if (error.isPresent()) {
      outcome.completeExceptionally(error.get());
    } else {
      outcome.complete(received.result(request.generate(), ticket, pursuit.numResumes(), quote));
    }
    if (reader != null) {
      reader.ended(error);
    }
  }

  private void dropAttempt() {
    Attempt last = attempt;
    attempt = null;
    if (last != null) {
      last.cancel();
    }
  }
}
