package dev.dragoman;

import dev.dragoman.DragomanException.Transport;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.function.Function;

/** Owner of which controller of a cell is asked now: one is asked until it fails, then the next, for everything at once. */
final class Controllers {
  private final List<String> addresses;
  private int index;

  /** Several addresses are listed with commas. */
  Controllers(String addresses) {
    this.addresses = Arrays.stream(addresses.split(",", -1)).map(String::strip).filter(one -> !one.isEmpty()).distinct().toList();
    if (this.addresses.isEmpty()) {
      throw Errors.invalid("controller", "the address is empty; give host:port, several with commas");
    }
  }

  /** The one to ask. */
  synchronized String current() {
    return addresses.get(index);
  }

  /** That one is away or shutting down. Late news of one that is no longer asked changes nothing. */
  synchronized void failed(String address) {
    if (address.equals(addresses.get(index))) {
      index = (index + 1) % addresses.size();
    }
  }

  /** The answer of the first that gives one; one that is away is passed over, each one once. Fails as the last does. */
  <R> CompletableFuture<R> ask(Function<String, CompletableFuture<R>> call) {
    Chained<R> answer = new Chained<>();
    ask(call, answer, 1);
    return answer;
  }

  private <R> void ask(Function<String, CompletableFuture<R>> call, Chained<R> answer, int asked) {
    String address = current();
    answer.follow(
        call.apply(address),
        (value, error) -> {
          if (error == null) {
            answer.complete(value);
          } else if (asked < addresses.size() && isAway(error)) {
            failed(address);
            ask(call, answer, asked + 1);
          } else {
            answer.completeExceptionally(error);
          }
        });
  }

  /** Whether another controller may do better: this one cannot be reached, or is shutting down. */
  static boolean isAway(Throwable error) {
    Throwable plain = error instanceof CompletionException ? error.getCause() : error;
    return plain instanceof DragomanException failure
        && (failure.transport() != Transport.NONE || failure.reason() == Reason.AGENT_DRAINING);
  }
}
