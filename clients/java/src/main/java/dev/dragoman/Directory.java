package dev.dragoman;

import com.google.protobuf.ByteString;
import dev.dragoman.Channels.Address;
import dev.dragoman.v1.AgentLoadSample;
import dev.dragoman.v1.AgentState;
import dev.dragoman.v1.FleetMember;
import dev.dragoman.v1.FleetServiceGrpc;
import dev.dragoman.v1.GetTokenizerRequest;
import dev.dragoman.v1.ListAgentsRequest;
import dev.dragoman.v1.ServedModel;
import dev.dragoman.v1.TelemetryServiceGrpc;
import dev.dragoman.v1.TokenizerServiceGrpc;
import dev.dragoman.v1.WatchLoadRequest;
import dev.dragoman.v1.WatchLoadResponse;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Collectors;

/**
 * Who serves what: the members of the fleet as the controller lists them, or the one agent of a direct client. Owner of the
 * member list, which is at most 2 s old where a model is looked up.
 */
final class Directory {
  private static final Duration FRESH = Duration.ofSeconds(2);

  private final Calls calls;
  private final Optional<Controllers> controllers;
  private final Optional<String> agent;
  private List<FleetMember> members = List.of();
  private long readAt;
  private String agentsModel = "";

  Directory(Calls calls, Optional<Controllers> controllers, Optional<String> agent) {
    this.calls = calls;
    this.controllers = controllers;
    this.agent = agent;
  }

  /** The controllers, for what an agent alone cannot tell. */
  Controllers controllers(String what) {
    return controllers.orElseThrow(
        () ->
            Errors.invalid("controller", what + " comes from a controller, and this client has an agent only"));
  }

  /** Every member, read now. */
  CompletableFuture<List<FleetMember>> members() {
    return calls
        .askController(
            controllers("the list of agents"),
            FleetServiceGrpc.getListAgentsMethod(),
            ListAgentsRequest.getDefaultInstance(),
            Calls.CALL_TIMEOUT)
        .thenApply(
            answer -> {
              synchronized (this) {
                members = answer.getMembersList();
                readAt = System.nanoTime();
                return members;
              }
            });
  }

  private CompletableFuture<List<FleetMember>> fresh() {
    synchronized (this) {
      if (!members.isEmpty() && System.nanoTime() - readAt <= FRESH.toNanos()) {
        return CompletableFuture.completedFuture(members);
      }
    }
    return members();
  }

  /** Names of the served models, sorted. */
  CompletableFuture<List<String>> models() {
    return agent.isPresent() ? modelOf(agent.get()).thenApply(List::of) : fresh().thenApply(Directory::names);
  }

  /** The model to ask for: the one named, or the only one served. */
  CompletableFuture<String> resolve(Optional<String> model) {
    if (model.isPresent()) {
      return CompletableFuture.completedFuture(model.get());
    }
    return agent.isPresent() ? modelOf(agent.get()) : fresh().thenApply(Directory::onlyModel);
  }

  private static String onlyModel(List<FleetMember> members) {
    // An agent lists one model under each of its names; the first is the one it is shown by.
    Map<ByteString, String> byDigest = new LinkedHashMap<>();
    for (FleetMember member : members) {
      for (ServedModel served : member.getAgent().getModelsList()) {
        byDigest.putIfAbsent(served.getModelDigest(), served.getModel());
      }
    }
    List<String> names = byDigest.values().stream().sorted().toList();
    if (names.isEmpty()) {
      throw new DragomanException(
          Reason.NO_AGENT, "no agent has registered with the controller yet; start one, or wait until it is ready");
    }
    if (names.size() > 1) {
      throw Errors.invalid("model", "several are served (" + String.join(", ", names) + "); name one");
    }
    return names.get(0);
  }

  /** A serving agent of a model. */
  CompletableFuture<Address> agentOf(String model) {
    return agent.isPresent()
        ? CompletableFuture.completedFuture(Address.of(agent.get()))
        : fresh().thenApply(found -> serving(found, model));
  }

  private static Address serving(List<FleetMember> members, String model) {
    for (FleetMember member : members) {
      boolean serves =
          member.getAgent().getModelsList().stream().anyMatch(served -> served.getModel().equals(model));
      if (serves && member.getState() == AgentState.AGENT_STATE_SERVING) {
        return addressOf(member);
      }
    }
    List<String> names = names(members);
    if (names.isEmpty() || names.contains(model)) {
      throw new DragomanException(
          Reason.NO_AGENT, "no agent that serves '" + model + "' is ready now; see 'dragoman ps'");
    }
    throw new DragomanException(
        Reason.MODEL_NOT_SERVED, "model '" + model + "' is not served; served: " + String.join(", ", names));
  }

  /** The agent of an id; without one, the only one there is. */
  CompletableFuture<Address> agentById(Optional<String> agentId) {
    return agent.isPresent()
        ? CompletableFuture.completedFuture(Address.of(agent.get()))
        : members().thenApply(found -> byId(found, agentId));
  }

  private static Address byId(List<FleetMember> members, Optional<String> agentId) {
    List<FleetMember> wanted =
        members.stream().filter(one -> agentId.isEmpty() || agentId.get().equals(one.getAgent().getAgentId())).toList();
    if (wanted.size() == 1) {
      return addressOf(wanted.get(0));
    }
    String ids = members.stream().map(one -> one.getAgent().getAgentId()).collect(Collectors.joining(", "));
    if (agentId.isPresent()) {
      String known = ids.isEmpty() ? "none" : ids;
      throw Errors.invalid("agent_id", "there is no agent '" + agentId.get() + "' (agents: " + known + ")");
    }
    if (wanted.isEmpty()) {
      throw new DragomanException(Reason.NO_AGENT, "no agent has registered with the controller yet");
    }
    throw Errors.invalid("agent_id", "there are several agents (" + ids + "); name one");
  }

  /** Every agent that may run requests. */
  CompletableFuture<List<Address>> addresses() {
    return agent.isPresent()
        ? CompletableFuture.completedFuture(List.of(Address.of(agent.get())))
        : members().thenApply(found -> found.stream().map(Directory::addressOf).toList());
  }

  /** One sample of each agent's load. */
  CompletableFuture<List<AgentLoadSample>> load() {
    var method = TelemetryServiceGrpc.getWatchLoadMethod();
    WatchLoadRequest request = WatchLoadRequest.getDefaultInstance();
    CompletableFuture<WatchLoadResponse> first =
        agent.isPresent()
            ? calls.askAgent(Address.of(agent.get()), method, request, Calls.CALL_TIMEOUT)
            : calls.askController(controllers("the load"), method, request, Calls.CALL_TIMEOUT);
    return first.thenApply(WatchLoadResponse::getAgentsList);
  }

  private CompletableFuture<String> modelOf(String target) {
    synchronized (this) {
      if (!agentsModel.isEmpty()) {
        return CompletableFuture.completedFuture(agentsModel);
      }
    }
    // The header comes first and is all that is wanted.
    return calls
        .askAgent(
            Address.of(target),
            TokenizerServiceGrpc.getGetTokenizerMethod(),
            GetTokenizerRequest.getDefaultInstance(),
            Calls.CALL_TIMEOUT)
        .thenApply(
            part -> {
              synchronized (this) {
                agentsModel = part.getHeader().getModel();
                return agentsModel;
              }
            });
  }

  private static List<String> names(List<FleetMember> members) {
    return members.stream()
        .flatMap(member -> member.getAgent().getModelsList().stream())
        .map(ServedModel::getModel)
        .distinct()
        .sorted()
        .toList();
  }

  private static Address addressOf(FleetMember member) {
    return new Address(member.getAgent().getDataAddress(), member.getAgent().getAgentId());
  }
}
