package dev.dragoman.conformance;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import dev.dragoman.GenerateOptions;
import dev.dragoman.Message;
import dev.dragoman.Priority;
import dev.dragoman.Prompt;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.function.Function;

/** The arguments of calls, read from JSON. */
final class Options {
  private Options() {}

  private interface Setter {
    void set(GenerateOptions.Builder options, JsonElement value);
  }

  private static final Map<String, Setter> SETTERS =
      Map.ofEntries(
          Map.entry("model", (options, value) -> options.model(value.getAsString())),
          Map.entry("request_id", (options, value) -> options.requestId(value.getAsString())),
          Map.entry("max_output_tokens", (options, value) -> options.maxOutputTokens(value.getAsInt())),
          Map.entry("min_output_tokens", (options, value) -> options.minOutputTokens(value.getAsInt())),
          Map.entry("temperature", (options, value) -> options.temperature(value.getAsFloat())),
          Map.entry("top_p", (options, value) -> options.topP(value.getAsFloat())),
          Map.entry("top_k", (options, value) -> options.topK(value.getAsInt())),
          Map.entry("min_p", (options, value) -> options.minP(value.getAsFloat())),
          Map.entry("seed", (options, value) -> options.seed(value.getAsLong())),
          Map.entry("n", (options, value) -> options.numChoices(value.getAsInt())),
          Map.entry("stop", (options, value) -> options.stop(list(value, JsonElement::getAsString))),
          Map.entry("stop_token_ids", (options, value) -> options.stopTokenIds(ids(value))),
          Map.entry("ignore_eos", (options, value) -> options.ignoreEos(value.getAsBoolean())),
          Map.entry("logprobs", (options, value) -> options.logprobs(value.getAsInt())),
          Map.entry("prompt_logprobs", (options, value) -> options.promptLogprobs(value.getAsInt())),
          Map.entry("add_special_tokens", (options, value) -> options.addSpecialTokens(value.getAsBoolean())),
          Map.entry("deadline", (options, value) -> options.deadline(seconds(value))),
          Map.entry("max_queue_wait", (options, value) -> options.maxQueueWait(seconds(value))),
          Map.entry(
              "priority",
              (options, value) -> options.priority(Priority.valueOf(value.getAsString().toUpperCase(Locale.ROOT)))));

  static GenerateOptions generate(JsonObject call) {
    GenerateOptions.Builder options = GenerateOptions.builder();
    of(call).entrySet().forEach(option -> SETTERS.get(option.getKey()).set(options, option.getValue()));
    return options.build();
  }

  static JsonObject of(JsonObject call) {
    return call.has("options") ? call.getAsJsonObject("options") : new JsonObject();
  }

  static <T> Optional<T> option(JsonObject call, String name, Function<JsonElement, T> read) {
    return Optional.ofNullable(of(call).get(name)).map(read);
  }

  static Prompt prompt(JsonObject call) {
    JsonObject prompt = call.getAsJsonObject("prompt");
    if (prompt.has("text")) {
      return Prompt.of(prompt.get("text").getAsString());
    }
    if (prompt.has("token_ids")) {
      return Prompt.ofTokens(ids(prompt.get("token_ids")));
    }
    if (prompt.has("repeat")) {
      return Prompt.of(prompt.get("repeat").getAsString().repeat(prompt.get("times").getAsInt()));
    }
    return Prompt.of(list(prompt.get("messages"), Options::message).toArray(Message[]::new));
  }

  private static Message message(JsonElement message) {
    JsonObject fields = message.getAsJsonObject();
    return new Message(fields.get("role").getAsString(), fields.get("content").getAsString());
  }

  static Prompt input(JsonElement input) {
    return input.isJsonArray() ? Prompt.ofTokens(ids(input)) : Prompt.of(input.getAsString());
  }

  static List<Integer> ids(JsonElement ids) {
    return list(ids, id -> (int) id.getAsLong());
  }

  static <T> List<T> list(JsonElement array, Function<JsonElement, T> read) {
    List<T> items = new ArrayList<>();
    JsonArray given = array.getAsJsonArray();
    given.forEach(item -> items.add(read.apply(item)));
    return items;
  }

  static Duration seconds(JsonElement value) {
    return Duration.ofNanos(Math.round(value.getAsDouble() * 1e9));
  }
}
