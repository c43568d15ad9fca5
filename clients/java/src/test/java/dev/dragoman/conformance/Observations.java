package dev.dragoman.conformance;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import dev.dragoman.Choice;
import dev.dragoman.DragomanException;
import dev.dragoman.FinishReason;
import dev.dragoman.GenerationResult;
import dev.dragoman.Token;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;

/** What is said of one call. */
final class Observations {
  private static final Gson GSON = new GsonBuilder().serializeNulls().disableHtmlEscaping().create();
  private static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);

  private final int index;

  Observations(int index) {
    this.index = index;
  }

  /** One line, seen by the harness at once. */
  static void emit(String event, JsonObject line) {
    line.addProperty("event", event);
    synchronized (OUT) {
      OUT.print(GSON.toJson(line) + "\n");
      OUT.flush();
    }
  }

  static JsonElement json(Object value) {
    return GSON.toJsonTree(value);
  }

  private void say(String event, JsonObject line) {
    line.addProperty("call", index);
    emit(event, line);
  }

  void token(Token token) {
    JsonObject line = new JsonObject();
    line.addProperty("cursor", token.cursor());
    line.addProperty("choice", token.choice());
    line.add("token_ids", json(token.tokenIds().stream().map(Integer::toUnsignedLong).toList()));
    line.addProperty("text", token.text());
    line.addProperty("finish_reason", token.finishReason().map(Observations::name).orElse(null));
    line.addProperty("num_logprobs", token.logprobs().size());
    say("token", line);
  }

  void result(GenerationResult result) {
    JsonObject line = new JsonObject();
    line.addProperty("request_id", result.requestId());
    line.addProperty("model", result.model());
    line.add("choices", json(result.choices().stream().map(Observations::choice).toList()));
    line.add(
        "usage",
        json(
            Map.of(
                "prompt_tokens", result.usage().promptTokens(),
                "cached_tokens", result.usage().cachedTokens(),
                "output_tokens", result.usage().outputTokens())));
    line.add("seed", new com.google.gson.JsonPrimitive(new java.math.BigInteger(Long.toUnsignedString(result.seed()))));
    line.addProperty("agent_id", result.agentId());
    line.addProperty("num_resumes", result.numResumes());
    say("result", line);
  }

  private static JsonObject choice(Choice choice) {
    JsonObject line = new JsonObject();
    line.addProperty("text", choice.text());
    line.add("token_ids", json(choice.tokenIds().stream().map(Integer::toUnsignedLong).toList()));
    line.addProperty("finish_reason", name(choice.finishReason()));
    line.addProperty("stop_string", choice.stopString().orElse(null));
    line.add("stop_token_id", orNull(choice.stopTokenId().map(Integer::toUnsignedLong)));
    line.addProperty("num_logprobs", choice.logprobs().size());
    return line;
  }

  void error(DragomanException error, double seconds) {
    JsonObject line = new JsonObject();
    line.addProperty("reason", error.reasonName());
    line.addProperty("message", error.getMessage());
    line.addProperty("retryable", error.retryable());
    line.add("retry_delay_seconds", orNull(error.retryDelay().map(delay -> delay.toNanos() / 1e9)));
    line.add("metadata", json(error.metadata()));
    line.addProperty("http_status", error.httpStatus());
    line.addProperty("grpc_code", error.grpcCode());
    line.addProperty("seconds", seconds);
    say("error", line);
  }

  void cancelled() {
    say("cancelled", new JsonObject());
  }

  void value(JsonElement value) {
    JsonObject line = new JsonObject();
    line.add("value", value);
    say("value", line);
  }

  void unsupported(String what) {
    JsonObject line = new JsonObject();
    line.addProperty("what", what);
    say("unsupported", line);
  }

  private static String name(FinishReason reason) {
    return reason.name().toLowerCase(Locale.ROOT);
  }

  private static JsonElement orNull(Optional<? extends Number> value) {
    return value.isPresent() ? json(value.get()) : JsonNull.INSTANCE;
  }
}
