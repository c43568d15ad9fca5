package dev.dragoman.conformance;

import com.google.gson.JsonElement;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import dev.dragoman.Client;
import dev.dragoman.DetokenizeOptions;
import dev.dragoman.EmbedOptions;
import dev.dragoman.Embeddings;
import dev.dragoman.Estimate;
import dev.dragoman.Quote;
import dev.dragoman.TokenizeOptions;
import dev.dragoman.v1.AgentLoadSample;
import dev.dragoman.v1.DeviceCandidate;
import dev.dragoman.v1.FleetMember;
import dev.dragoman.v1.GetHardwareResponse;
import dev.dragoman.v1.ServedModel;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.function.BiFunction;
import java.util.stream.Stream;

/** The calls that give one value. */
final class Values {
  private Values() {}

  private static final Map<String, BiFunction<Client, JsonObject, JsonElement>> CALLS =
      Map.of(
          "load_streams", LoadStreams::run,
          "embed", Values::embed,
          "tokenize", Values::tokenize,
          "detokenize", Values::detokenize,
          "quote", Values::quote,
          "cancel", Values::cancel,
          "models", (client, call) -> Observations.json(client.models()),
          "agents", (client, call) -> Observations.json(client.agents().stream().map(Values::member).toList()),
          "hardware", Values::hardware,
          "load", (client, call) -> Observations.json(client.load().stream().map(Values::sample).toList()));

  static void run(Client client, Observations seen, JsonObject call) {
    String what = call.get("do").getAsString();
    var run = CALLS.get(what);
    if (run == null) {
      seen.unsupported(what);
    } else {
      seen.value(run.apply(client, call));
    }
  }

  private static Optional<String> model(JsonObject call) {
    return Options.option(call, "model", JsonElement::getAsString);
  }

  private static JsonElement embed(Client client, JsonObject call) {
    Optional<Integer> dimensions = Options.option(call, "dimensions", JsonElement::getAsInt);
    Embeddings answer =
        client.embed(
            Options.list(call.get("inputs"), Options::input),
            new EmbedOptions(model(call), dimensions, Optional.empty()));
    return Observations.json(Map.of("vectors", answer.vectors(), "prompt_tokens", answer.promptTokens()));
  }

  private static JsonElement tokenize(Client client, JsonObject call) {
    TokenizeOptions options =
        new TokenizeOptions(
            model(call),
            Options.option(call, "add_special_tokens", JsonElement::getAsBoolean),
            Options.option(call, "parse_special_tokens", JsonElement::getAsBoolean));
    return Observations.json(client.tokenize(call.get("text").getAsString(), options));
  }

  private static JsonElement detokenize(Client client, JsonObject call) {
    Optional<Boolean> skip = Options.option(call, "skip_special_tokens", JsonElement::getAsBoolean);
    return Observations.json(
        client.detokenize(Options.ids(call.get("token_ids")), new DetokenizeOptions(model(call), skip)));
  }

  private static JsonElement quote(Client client, JsonObject call) {
    Quote quote = client.quote(Options.prompt(call), Options.generate(call));
    return Observations.json(
        Map.of(
            "agent_id", quote.agentId(),
            "time_to_first_token", estimate(quote.timeToFirstToken()),
            "time_per_output_token", estimate(quote.timePerOutputToken()),
            "finish", estimate(quote.finish())));
  }

  private static List<Double> estimate(Estimate estimate) {
    return Stream.of(estimate.p10(), estimate.expected(), estimate.p90()).map(Values::seconds).toList();
  }

  private static double seconds(Duration duration) {
    return duration.toNanos() / 1e9;
  }

  private static JsonElement cancel(Client client, JsonObject call) {
    client.cancel(call.get("request_id").getAsString());
    return JsonNull.INSTANCE;
  }

  private static Map<String, Object> member(FleetMember member) {
    return Map.of(
        "agent_id", member.getAgent().getAgentId(),
        "state", member.getStateValue(),
        "models", member.getAgent().getModelsList().stream().map(ServedModel::getModel).toList(),
        "heartbeat_age_seconds",
            member.getHeartbeatAge().getSeconds() + member.getHeartbeatAge().getNanos() / 1e9);
  }

  private static JsonElement hardware(Client client, JsonObject call) {
    GetHardwareResponse answer =
        call.has("agent_id") && !call.get("agent_id").isJsonNull()
            ? client.hardware(call.get("agent_id").getAsString())
            : client.hardware();
    return Observations.json(
        Map.of(
            "kind", answer.getProfile().getDevice().getKind(),
            "chosen", answer.getCandidatesList().stream().map(DeviceCandidate::getChosen).toList()));
  }

  private static Map<String, Object> sample(AgentLoadSample sample) {
    return Map.of(
        "agent_id", sample.getAgentId(),
        "running_requests", sample.getLoad().getRunningRequests(),
        "waiting_requests", sample.getLoad().getWaitingRequests(),
        "free_kv_blocks", sample.getLoad().getFreeKvBlocks());
  }
}
