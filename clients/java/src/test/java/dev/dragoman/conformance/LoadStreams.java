package dev.dragoman.conformance;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.sun.management.OperatingSystemMXBean;
import dev.dragoman.Client;
import dev.dragoman.GenerateOptions;
import dev.dragoman.Prompt;
import dev.dragoman.Token;
import java.lang.management.ManagementFactory;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.Flow;

/** Many streams at once, and the CPU seconds of this process for them. */
final class LoadStreams {
  private LoadStreams() {}

  static JsonElement run(Client client, JsonObject call) {
    Prompt prompt = Options.prompt(call);
    GenerateOptions options = Options.generate(call);
    OperatingSystemMXBean system = ManagementFactory.getPlatformMXBean(OperatingSystemMXBean.class);
    long before = system.getProcessCpuTime();
    long began = System.nanoTime();
    List<Counter> counters = new ArrayList<>();
    for (int index = 0; index < call.get("streams").getAsInt(); index++) {
      Counter counter = new Counter();
      client.generate(prompt, options).subscribe(counter);
      counters.add(counter);
    }
    for (Counter counter : counters) {
      try {
        counter.end.join();
      } catch (CompletionException error) {
        throw (RuntimeException) error.getCause();
      }
    }
    return Observations.json(
        Map.of(
            "tokens", counters.stream().mapToLong(counter -> counter.numTokens).sum(),
            "items", counters.stream().mapToLong(counter -> counter.numItems).sum(),
            "cpu_seconds", (system.getProcessCpuTime() - before) / 1e9,
            "wall_seconds", (System.nanoTime() - began) / 1e9));
  }

  /** Reads one stream to its end. */
  private static final class Counter implements Flow.Subscriber<Token> {
    private final CompletableFuture<Void> end = new CompletableFuture<>();
    private long numTokens;
    private long numItems;

    @Override
    public void onSubscribe(Flow.Subscription subscription) {
      subscription.request(Long.MAX_VALUE);
    }

    @Override
    public void onNext(Token token) {
      numTokens += token.tokenIds().size();
      numItems++;
    }

    @Override
    public void onError(Throwable error) {
      end.completeExceptionally(error);
    }

    @Override
    public void onComplete() {
      end.complete(null);
    }
  }
}
