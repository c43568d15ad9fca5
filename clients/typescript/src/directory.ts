/** Who serves what: the members of the fleet as the controller lists them, or the one agent of a direct client. */

import { AgentState } from "../gen/dragoman/v1/agent.js";
import { type FleetMember, FleetServiceService } from "../gen/dragoman/v1/fleet_service.js";
import { type AgentLoadSample, TelemetryServiceService } from "../gen/dragoman/v1/telemetry_service.js";
import { TokenizerServiceService } from "../gen/dragoman/v1/tokenizer_service.js";
import { first } from "./calls.js";
import type { Address, Channels } from "./channels.js";
import type { Controllers } from "./controllers.js";
import { monotonicSeconds } from "./durations.js";
import { DragomanError, invalid } from "./errors.js";
import type { Scope } from "./scope.js";
import { AGENT, ask, askController, CALL_SECONDS, CONTROLLER } from "./ticket.js";

// How long a list of members is good enough to find an agent for a template or the name of the one model.
const FRESH_SECONDS = 2;

/** Whom a client talks to: the controllers of a cell, or one open agent. */
export type Cell = { readonly controllers: Controllers } | { readonly agent: string };

/** Finds models and agents. Owner of the member list, which is at most 2 s old where a model is looked up. */
export class Directory {
  readonly #channels: Channels;
  readonly #cell: Cell;
  #members: readonly FleetMember[] = [];
  #readTime = -Infinity;
  #agentsModel: string | undefined;

  constructor(channels: Channels, cell: Cell) {
    this.#channels = channels;
    this.#cell = cell;
  }

  /** The controllers. Throws invalid_request where there are none. */
  controllers(what: string): Controllers {
    if ("agent" in this.#cell) {
      throw invalid("controller", `${what} comes from a controller, and this client has an agent only`);
    }
    return this.#cell.controllers;
  }

  /** Every member, read now. */
  async members(scope: Scope): Promise<readonly FleetMember[]> {
    const controllers = this.controllers("the list of agents");
    const method = FleetServiceService.listAgents;
    const answer = await askController(this.#channels, controllers, scope, CALL_SECONDS, method, {});
    this.#members = answer.members;
    this.#readTime = monotonicSeconds();
    return this.#members;
  }

  /** Names of the served models, sorted. */
  async models(scope: Scope): Promise<string[]> {
    if ("agent" in this.#cell) {
      return [await this.#modelOfAgent(this.#cell.agent, scope)];
    }
    return namesOf(await this.#fresh(scope));
  }

  /** The model to ask for: the one named, or the only one served. */
  async resolve(model: string | undefined, scope: Scope): Promise<string> {
    if (model) {
      return model;
    }
    if ("agent" in this.#cell) {
      return this.#modelOfAgent(this.#cell.agent, scope);
    }
    // An agent lists one model under each of its names; the first is the one it is shown by.
    const byDigest = new Map<string, string>();
    for (const { agent } of await this.#fresh(scope)) {
      for (const served of agent?.models ?? []) {
        const digest = served.modelDigest.toString("hex");
        byDigest.set(digest, byDigest.get(digest) ?? served.model);
      }
    }
    const names = [...byDigest.values()].sort();
    const [only] = names;
    if (only === undefined) {
      throw noAgent("no agent has registered with the controller yet; start one, or wait until it is ready");
    }
    if (names.length > 1) {
      throw invalid("model", `several are served (${names.join(", ")}); name one`);
    }
    return only;
  }

  /** A serving agent of the model. */
  async agentOf(model: string, scope: Scope): Promise<Address> {
    if ("agent" in this.#cell) {
      return { target: this.#cell.agent, agentId: "" };
    }
    const members = await this.#fresh(scope);
    const serving = members.find(
      ({ state, agent }) => state === AgentState.SERVING && agent?.models.some((served) => served.model === model),
    );
    if (serving !== undefined) {
      return addressOf(serving);
    }
    const names = namesOf(members);
    if (names.length === 0 || names.includes(model)) {
      throw noAgent(`no agent that serves "${model}" is ready now; see 'dragoman ps'`);
    }
    throw new DragomanError("model_not_served", `model "${model}" is not served; served: ${names.join(", ")}`);
  }

  /** The agent of that id; undefined is the only one there is. */
  async agentById(agentId: string | undefined, scope: Scope): Promise<Address> {
    if ("agent" in this.#cell) {
      return { target: this.#cell.agent, agentId: "" };
    }
    const members = await this.members(scope);
    const wanted = members.filter(({ agent }) => agentId === undefined || agent?.agentId === agentId);
    const [only] = wanted;
    if (wanted.length === 1 && only !== undefined) {
      return addressOf(only);
    }
    const ids = members.map((member) => addressOf(member).agentId).join(", ") || "none";
    if (agentId !== undefined) {
      throw invalid("agentId", `there is no agent "${agentId}" (agents: ${ids})`);
    }
    if (wanted.length === 0) {
      throw noAgent("no agent has registered with the controller yet");
    }
    throw invalid("agentId", `there are several agents (${ids}); name one`);
  }

  /** Every agent that may run requests. */
  async addresses(scope: Scope): Promise<Address[]> {
    if ("agent" in this.#cell) {
      return [{ target: this.#cell.agent, agentId: "" }];
    }
    return (await this.members(scope)).map(addressOf);
  }

  /** One sample of each agent's load. */
  async load(scope: Scope): Promise<readonly AgentLoadSample[]> {
    const atController = "controllers" in this.#cell;
    const target = atController ? this.#cell.controllers.current : this.#cell.agent;
    const party = atController ? CONTROLLER : AGENT;
    const answer = await ask(this.#channels, { target, agentId: "" }, party, scope, CALL_SECONDS, (client, left) =>
      first(client, TelemetryServiceService.watchLoad, { interval: undefined }, scope, left),
    );
    return answer?.agents ?? [];
  }

  async #fresh(scope: Scope): Promise<readonly FleetMember[]> {
    const old = monotonicSeconds() - this.#readTime > FRESH_SECONDS;
    return old || this.#members.length === 0 ? this.members(scope) : this.#members;
  }

  async #modelOfAgent(target: string, scope: Scope): Promise<string> {
    if (this.#agentsModel === undefined) {
      // The header comes first and is all that is wanted.
      const request = { model: "", knownDigest: Buffer.alloc(0) };
      const answer = await ask(this.#channels, { target, agentId: "" }, AGENT, scope, CALL_SECONDS, (client, left) =>
        first(client, TokenizerServiceService.getTokenizer, request, scope, left),
      );
      this.#agentsModel = answer?.part?.$case === "header" ? answer.part.value.model : "";
    }
    return this.#agentsModel;
  }
}

function namesOf(members: readonly FleetMember[]): string[] {
  return [...new Set(members.flatMap(({ agent }) => agent?.models.map(({ model }) => model) ?? []))].sort();
}

function addressOf({ agent }: FleetMember): Address {
  return { target: agent?.dataAddress ?? "", agentId: agent?.agentId ?? "" };
}

function noAgent(message: string): DragomanError {
  return new DragomanError("no_agent", message);
}
