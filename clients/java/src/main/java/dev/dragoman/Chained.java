package dev.dragoman;

import java.util.concurrent.CompletableFuture;
import java.util.function.BiConsumer;

/** A future made of several steps: cancelling it cancels the step under way. */
final class Chained<R> extends CompletableFuture<R> {
  private CompletableFuture<?> step;

  /** Goes on with {@code next} once {@code step} is done, unless this was cancelled. */
  <T> void follow(CompletableFuture<T> step, BiConsumer<? super T, ? super Throwable> next) {
    synchronized (this) {
      this.step = step;
    }
    if (isDone()) {
      step.cancel(false);
    }
    var unused =
        step.whenComplete(
            (value, error) -> {
              if (isDone()) {
                return;
              }
              try {
                next.accept(value, error);
              } catch (RuntimeException failure) {
                completeExceptionally(failure);
              }
            });
  }

  @Override
  public boolean cancel(boolean mayInterruptIfRunning) {
    boolean cancelled = super.cancel(mayInterruptIfRunning);
    CompletableFuture<?> last;
    synchronized (this) {
      last = step;
    }
    if (last != null) {
      last.cancel(false);
    }
    return cancelled;
  }
}
