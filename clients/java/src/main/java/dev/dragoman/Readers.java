package dev.dragoman;

import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.Executor;
import java.util.concurrent.Flow;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.atomic.AtomicInteger;

/** The two ways to take the tokens of a generation: an iterator that waits, and a subscriber that is called. */
final class Readers {
  private Readers() {}

  /** The end of a stream, as an item of a queue. */
  private record End(Optional<DragomanException> error) {}

  /** Waits for the next token on the thread of the caller. */
  static final class Waiting implements Iterator<Token>, Generation.Reader {
    // A few ahead, so that a reader that keeps up does not wait for a round of requests.
    private static final int AHEAD = 16;

    private final Generation generation;
    private final LinkedBlockingQueue<Object> items = new LinkedBlockingQueue<>();
    private boolean begun;
    private int numTaken;
    private Token next;
    private End end;

    Waiting(Generation generation) {
      this.generation = generation;
    }

    @Override
    public void token(Token token) {
      items.add(token);
    }

    @Override
    public void ended(Optional<DragomanException> error) {
      items.add(new End(error));
    }

    @Override
    public boolean hasNext() {
      if (next == null && end == null) {
        take();
      }
      if (next != null) {
        return true;
      }
      if (end.error().isPresent()) {
        // Made anew: the place where it was waited for belongs to it.
        throw end.error().get().withMessage(end.error().get().getMessage());
      }
      return false;
    }

    @Override
    public Token next() {
      if (!hasNext()) {
        throw new NoSuchElementException("the stream has ended");
      }
      Token token = next;
      next = null;
      if (++numTaken == AHEAD / 2) {
        generation.request(numTaken);
        numTaken = 0;
      }
      return token;
    }

    private void take() {
      if (!begun) {
        begun = true;
        generation.readBy(this);
        generation.request(AHEAD);
      }
      try {
        Object item = items.take();
        if (item instanceof Token token) {
          next = token;
        } else {
          end = (End) item;
        }
      } catch (InterruptedException error) {
        Thread.currentThread().interrupt();
        generation.cancel();
        end = new End(Optional.of(interrupted(error)));
      }
    }
  }

  /** The error of a thread that was interrupted while it waited. */
  static DragomanException interrupted(InterruptedException error) {
    DragomanException cancelled = new DragomanException(Reason.CANCELLED, "the waiting thread was interrupted");
    cancelled.initCause(error);
    return cancelled;
  }

  /** Calls a subscriber through an executor, one call after the other, as it asks for tokens. */
  static final class Calling implements Generation.Reader, Flow.Subscription {
    private final Generation generation;
    private final Flow.Subscriber<? super Token> subscriber;
    private final Executor executor;
    private final ConcurrentLinkedQueue<Object> items = new ConcurrentLinkedQueue<>();
    private final AtomicInteger numWaiting = new AtomicInteger();
    private volatile boolean cancelled;

    Calling(Generation generation, Flow.Subscriber<? super Token> subscriber, Executor executor) {
      this.generation = generation;
      this.subscriber = subscriber;
      this.executor = executor;
    }

    void begin() {
      subscriber.onSubscribe(this);
      generation.readBy(this);
    }

    @Override
    public void request(long numTokens) {
      if (cancelled) {
        return;
      }
      if (numTokens <= 0) {
        add(new IllegalArgumentException("request(" + numTokens + "): a subscriber asks for at least one item"));
        generation.cancel();
      } else {
        generation.request(numTokens);
      }
    }

    @Override
    public void cancel() {
      cancelled = true;
      generation.cancel();
    }

    @Override
    public void token(Token token) {
      add(token);
    }

    @Override
    public void ended(Optional<DragomanException> error) {
      add(new End(error));
    }

    private void add(Object item) {
      items.add(item);
      if (numWaiting.getAndIncrement() == 0) {
        executor.execute(this::drain);
      }
    }

    private void drain() {
      do {
        Object item = items.poll();
        if (!cancelled) {
          try {
            give(item);
          } catch (RuntimeException error) {
            cancel();
            Thread thread = Thread.currentThread();
            thread.getUncaughtExceptionHandler().uncaughtException(thread, error);
          }
        }
      } while (numWaiting.decrementAndGet() > 0);
    }

    private void give(Object item) {
      if (item instanceof Token token) {
        subscriber.onNext(token);
        return;
      }
      cancelled = true; // nothing comes after an end
      if (item instanceof End end && end.error().isEmpty()) {
        subscriber.onComplete();
      } else {
        subscriber.onError(item instanceof End end ? end.error().orElseThrow() : (RuntimeException) item);
      }
    }
  }
}
