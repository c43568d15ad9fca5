package dev.dragoman.conformance;

import com.google.gson.JsonObject;
import dev.dragoman.Client;
import dev.dragoman.DragomanException;
import dev.dragoman.GenerationStream;
import dev.dragoman.Reason;
import dev.dragoman.Token;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;

/** One stream, with the actions of the call, to the one end. */
final class Generate {
  private Generate() {}

  static void run(Client client, Observations seen, JsonObject call) {
    JsonObject actions = call.has("actions") ? call.getAsJsonObject("actions") : new JsonObject();
    AtomicBoolean left = new AtomicBoolean();
    try (GenerationStream stream = client.generate(Options.prompt(call), Options.generate(call))) {
      number(actions, "cancel_after_seconds").ifPresent(seconds -> leaveAfter(seconds, stream, left));
      if (number(actions, "cancel_after_tokens").filter(limit -> limit == 0).isPresent()) {
        stream.close();
        seen.cancelled();
      } else {
        read(stream, seen, actions);
      }
    } catch (DragomanException error) {
      if (left.get() && error.reason() == Reason.CANCELLED) {
        seen.cancelled();
      } else {
        throw error;
      }
    }
  }

  private static void leaveAfter(double seconds, GenerationStream stream, AtomicBoolean left) {
    var unused =
        new CompletableFuture<Void>()
            .completeOnTimeout(null, (long) (seconds * 1e9), TimeUnit.NANOSECONDS)
            .thenRunAsync(
                () -> {
                  left.set(true);
                  stream.close();
                });
  }

  private static void read(GenerationStream stream, Observations seen, JsonObject actions) {
    double limit = number(actions, "cancel_after_tokens").orElse(Double.POSITIVE_INFINITY);
    double pauseAt = number(actions, "pause_after_tokens").orElse(Double.POSITIVE_INFINITY);
    int numTokens = 0;
    for (Token token : stream) {
      numTokens += token.tokenIds().size();
      seen.token(token);
      if (numTokens >= limit) {
        stream.close();
        seen.cancelled();
        return;
      }
      if (numTokens >= pauseAt) {
        pauseAt = Double.POSITIVE_INFINITY;
        pause(actions.get("pause_seconds").getAsDouble());
      }
    }
    seen.result(stream.result());
  }

  private static void pause(double seconds) {
    try {
      Thread.sleep((long) (seconds * 1000));
    } catch (InterruptedException error) {
      Thread.currentThread().interrupt();
    }
  }

  private static Optional<Double> number(JsonObject actions, String name) {
    return Optional.ofNullable(actions.get(name)).map(value -> value.getAsDouble());
  }
}
