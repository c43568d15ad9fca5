package dev.dragoman;

import dev.dragoman.v1.Ticket;
import java.util.Iterator;
import java.util.Optional;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicReference;

/**
 * A generation: iterate over its tokens, or subscribe to them.
 *
 * <p>Nothing is sent before the first token is asked for. An agent that dies is replaced and the stream goes on at the next
 * token, at most 3 times; the reader only sees a pause. A stream has one reader; {@code close} and the methods that tell of its
 * state may be called from any thread. Errors are {@link DragomanException}.
 */
public final class GenerationStream implements Iterable<Token>, Flow.Publisher<Token>, AutoCloseable {
  private final Generation generation;
  private final Executor executor;
  private final AtomicReference<Generation.Reader> reader = new AtomicReference<>();

  GenerationStream(Generation generation, Executor executor) {
    this.generation = generation;
    this.executor = executor;
  }

  /**
   * Waits for the tokens, one after the other, on the thread of the caller. A loop that is left early must be followed by
   * {@code close}: use try-with-resources. Interrupting the thread cancels the request.
   */
  @Override
  public Iterator<Token> iterator() {
    return waiting().orElseThrow(
        () -> new IllegalStateException("a stream has one reader; do not iterate over it twice"));
  }

  private Optional<Readers.Waiting> waiting() {
    Readers.Waiting waiting = new Readers.Waiting(generation);
    return reader.compareAndSet(null, waiting) ? Optional.of(waiting) : Optional.empty();
  }

  /**
   * Calls the subscriber with the tokens that it asks for, on the executor of the client; cancelling the subscription cancels
   * the request.
   */
  @Override
  public void subscribe(Flow.Subscriber<? super Token> subscriber) {
    Readers.Calling calling = new Readers.Calling(generation, subscriber, executor);
    if (!reader.compareAndSet(null, calling)) {
      subscriber.onSubscribe(new NoSubscription());
      subscriber.onError(new IllegalStateException("a stream has one reader; it can be subscribed to once"));
      return;
    }
    calling.begin();
  }

  /**
   * Reads what is left and returns the whole; where a subscriber reads, waits for its end. After {@code close} it throws with
   * CANCELLED, unless the stream had ended.
   */
  public GenerationResult result() {
    Optional<Readers.Waiting> fresh = generation.outcome().isDone() ? Optional.empty() : waiting();
    if (fresh.isPresent() || reader.get() instanceof Readers.Waiting) {
      ((Readers.Waiting) reader.get()).forEachRemaining(token -> {});
    }
    return Client.await(generation.outcome());
  }

  /** Cancels what still runs; the agent frees the request. May be called more than once. */
  @Override
  public void close() {
    generation.cancel();
  }

  /** Id of the request; empty until the first token was asked for. */
  public Optional<String> requestId() {
    return generation.requestId();
  }

  /** The agent that runs it now; empty before it is placed, "" for an open agent. */
  public Optional<String> agentId() {
    return generation.ticket().map(Ticket::getAgentId);
  }

  /** Data address of that agent. */
  public Optional<String> agentAddress() {
    return generation.ticket().map(Ticket::getDataAddress);
  }

  /** How often it was continued after a cut. */
  public int numResumes() {
    return generation.numResumes();
  }

  /** What the controller promised; empty until it is placed and for an open agent. */
  public Optional<Quote> quote() {
    return generation.quote();
  }

  private static final class NoSubscription implements Flow.Subscription {
    @Override
    public void request(long numTokens) {
      // there is nothing to come
    }

    @Override
    public void cancel() {
      // there is nothing to cancel
    }
  }
}
