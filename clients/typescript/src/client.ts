/** The client: generation with resume, embeddings, tokenizing, and what controller and agents tell of themselves. */

import { randomUUID } from "node:crypto";

import type { ChannelCredentials } from "@grpc/grpc-js";

import { AcquireTicketRequest, AdmissionServiceService } from "../gen/dragoman/v1/admission_service.js";
import { type EmbedRequest, EmbeddingServiceService } from "../gen/dragoman/v1/embedding_service.js";
import type { FleetMember } from "../gen/dragoman/v1/fleet_service.js";
import { GenerationServiceService } from "../gen/dragoman/v1/generation_service.js";
import { type GetHardwareResponse, HardwareServiceService } from "../gen/dragoman/v1/hardware_service.js";
import type { AgentLoadSample } from "../gen/dragoman/v1/telemetry_service.js";
import { TokenizerServiceService } from "../gen/dragoman/v1/tokenizer_service.js";
import type { Method } from "./calls.js";
import { Channels } from "./channels.js";
import { Controllers } from "./controllers.js";
import { Directory } from "./directory.js";
import { DragomanError, invalid } from "./errors.js";
import {
  type CallOptions,
  checkOptions,
  checkPrompt,
  GENERATE_OPTIONS,
  type GenerateOptions,
  isConversation,
  prepare,
  type Prepared,
  type Prompt,
} from "./request.js";
import { type Embeddings, type GenerationResult, type Quote, quoteOf } from "./results.js";
import { RetryBudget, type RetryPolicy, retryPolicyOf } from "./retry.js";
import { Scope, within } from "./scope.js";
import { type Context, GenerationStream } from "./stream.js";
import {
  askAgent,
  askController,
  CALL_SECONDS,
  ControllerAdmission,
  digestOfInputs,
  OpenAgent,
  QUEUE_SECONDS,
} from "./ticket.js";

/** Where a client looks for a controller when neither its configuration nor $DRAGOMAN_CONTROLLER names one. */
export const DEFAULT_CONTROLLER = "127.0.0.1:50050";

/** Whom a client talks to, and how. */
export interface ClientConfig {
  /** host:port of a controller; several of one cell with commas: another is asked when one is away. */
  readonly controller?: string | undefined;
  /** host:port of one agent that was started with --open; there is no controller then. */
  readonly agent?: string | undefined;
  /** Charged for the requests; left out is the default tenant. */
  readonly tenant?: string | undefined;
  /** Encrypts connections; the certificate of an agent must name its id. Left out is for loopback only. */
  readonly credentials?: ChannelCredentials | undefined;
  /** How hard to try; what is left out has its default. */
  readonly retry?: Partial<RetryPolicy> | undefined;
}

/** Options of `tokenize`. */
export interface TokenizeOptions extends CallOptions {
  readonly model?: string | undefined;
  readonly addSpecialTokens?: boolean | undefined;
  readonly parseSpecialTokens?: boolean | undefined;
}

/** Options of `detokenize`. */
export interface DetokenizeOptions extends CallOptions {
  readonly model?: string | undefined;
  readonly skipSpecialTokens?: boolean | undefined;
}

/** Options of `embed`. */
export interface EmbedOptions extends CallOptions {
  readonly model?: string | undefined;
  /** Cuts the vectors and normalises them again. */
  readonly dimensions?: number | undefined;
  /** The model's own prompt that goes before each text, such as "query"; the files' default otherwise. */
  readonly promptName?: string | undefined;
  /** The task of the queries that the texts are, in the form that the model was trained with; not with `promptName`. */
  readonly instruction?: string | undefined;
}

const BOUNDS = ["deadlineSeconds", "signal"] as const;
const CONFIG = ["controller", "agent", "tenant", "credentials", "retry"];

/** Talks to a controller and its agents, or to one open agent. Errors are DragomanError. */
export class Client implements AsyncDisposable {
  readonly #tenant: string;
  readonly #context: Context;
  readonly #directory: Directory;
  readonly #live = new Set<Scope>();

  /** Nothing is dialled before the first call. */
  constructor(config: ClientConfig = {}) {
    const unknown = Object.keys(config).find((name) => !CONFIG.includes(name));
    if (unknown !== undefined) {
      throw invalid(unknown, `is not known; a client has ${CONFIG.join(", ")}`);
    }
    if (config.controller !== undefined && config.agent !== undefined) {
      throw invalid("agent", "controller and agent are both given; an open agent has no controller");
    }
    if (config.agent?.trim() === "" || config.controller?.trim() === "") {
      const name = config.agent === undefined ? "controller" : "agent";
      throw invalid(name, "the address is empty; give host:port, or leave it out for the default");
    }
    const policy = retryPolicyOf(config.retry ?? {});
    const channels = new Channels(config.credentials);
    this.#tenant = config.tenant ?? "";
    const shared = { channels, policy, budget: new RetryBudget(policy.budget) };
    if (config.agent !== undefined) {
      const agent = config.agent.trim();
      this.#context = { ...shared, admission: new OpenAgent(agent) };
      this.#directory = new Directory(channels, { agent });
    } else {
      const named = config.controller ?? process.env["DRAGOMAN_CONTROLLER"];
      const controllers = new Controllers(named === undefined || named === "" ? DEFAULT_CONTROLLER : named);
      this.#context = { ...shared, admission: new ControllerAdmission(channels, controllers, this.#live) };
      this.#directory = new Directory(channels, { controllers });
    }
  }

  /** Closes all connections; what is under way is cancelled. */
  async close(): Promise<void> {
    const error = new DragomanError("cancelled", "the client is closed");
    await this.#context.admission.close();
    for (const scope of this.#live) {
      scope.abort(error);
    }
    this.#context.channels.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** Generates after a text, token ids, or a conversation. The stream sends nothing until it is read. */
  generate(prompt: Prompt, options: GenerateOptions = {}): GenerationStream {
    checkOptions(options, GENERATE_OPTIONS);
    checkPrompt(prompt);
    return new GenerationStream(this.#context, (scope) => this.#prepare(prompt, options, scope), this.#scope(options));
  }

  /** As `generate`, the whole result at once. */
  async complete(prompt: Prompt, options: GenerateOptions = {}): Promise<GenerationResult> {
    return await this.generate(prompt, options).result();
  }

  /** One vector an input, in order. An input is a text or a list of token ids. */
  async embed(
    inputs: string | readonly (string | readonly number[])[],
    options: EmbedOptions = {},
  ): Promise<Embeddings> {
    const { dimensions, promptName, instruction, ...others } = options;
    checkOptions(others, ["model", ...BOUNDS]);
    const list = typeof inputs === "string" ? [inputs] : inputs;
    if (list.length === 0) {
      throw invalid("inputs", "is empty; give at least one text");
    }
    list.forEach((input, index) => {
      checkPrompt(input, `inputs[${String(index)}]`);
    });
    if (dimensions !== undefined && !(Number.isInteger(dimensions) && dimensions > 0 && dimensions < 2 ** 32)) {
      throw invalid("dimensions", `must be a whole number above 0, not ${String(dimensions)}`);
    }
    for (const [name, text] of Object.entries({ promptName, instruction }) as [string, unknown][]) {
      if (text !== undefined && (typeof text !== "string" || !text.isWellFormed())) {
        throw invalid(name, "must be a text of valid Unicode");
      }
    }
    return within(this.#scope(options), async (scope) => {
      const model = await this.#directory.resolve(options.model, scope);
      const { request, acquire } = this.#embedding(list, { model, dimensions, promptName, instruction });
      const { tickets } = await this.#context.admission.acquire(acquire, scope);
      const [{ dataAddress, agentId, token }] = tickets;
      const where = { target: dataAddress, agentId };
      const method = EmbeddingServiceService.embed;
      const sent = { ...request, ticketToken: token };
      const answer = await askAgent(this.#context.channels, where, scope, QUEUE_SECONDS, method, sent);
      return { vectors: answer.embeddings.map(({ values }) => values), promptTokens: answer.promptTokens };
    });
  }

  /** The token ids of a text. The two switches default to the agent's: yes. */
  async tokenize(text: string, options: TokenizeOptions = {}): Promise<number[]> {
    checkOptions(options, ["model", "addSpecialTokens", "parseSpecialTokens", ...BOUNDS]);
    if (typeof (text as unknown) !== "string" || !text.isWellFormed()) {
      throw invalid("text", "must be a text of valid Unicode");
    }
    const answer = await within(this.#scope(options), (scope) =>
      this.#atAgentOf(options.model, scope, TokenizerServiceService.tokenize, (model) => ({
        model,
        text,
        addSpecialTokens: options.addSpecialTokens,
        parseSpecialTokens: options.parseSpecialTokens,
      })),
    );
    return answer.tokenIds?.ids ?? [];
  }

  /** The text of token ids; bytes that form no character appear as U+FFFD. */
  async detokenize(tokenIds: readonly number[], options: DetokenizeOptions = {}): Promise<string> {
    checkOptions(options, ["model", "skipSpecialTokens", ...BOUNDS]);
    checkOptions({ stopTokenIds: tokenIds }, ["stopTokenIds"]);
    const answer = await within(this.#scope(options), (scope) =>
      this.#atAgentOf(options.model, scope, TokenizerServiceService.detokenize, (model) => ({
        model,
        tokenIds: { ids: [...tokenIds] },
        skipSpecialTokens: options.skipSpecialTokens,
      })),
    );
    return answer.text;
  }

  /** What the request would cost now, and where it would go. Grants nothing. */
  async quote(prompt: Prompt, options: GenerateOptions = {}): Promise<Quote> {
    checkOptions(options, GENERATE_OPTIONS);
    checkPrompt(prompt);
    const controllers = this.#directory.controllers("a quote");
    return within(this.#scope(options), async (scope) => {
      const { acquire } = await this.#prepare(prompt, options, scope);
      const method = AdmissionServiceService.quote;
      const request = { request: acquire };
      const answer = await askController(this.#context.channels, controllers, scope, CALL_SECONDS, method, request);
      const quote = quoteOf(answer.quote, answer.agentId);
      if (quote === undefined) {
        throw new DragomanError("internal", "the controller answered without a quote");
      }
      return quote;
    });
  }

  /** Cancels a request that was started anywhere. One that is unknown or has ended is no error. */
  async cancel(requestId: string, options: CallOptions = {}): Promise<void> {
    checkOptions(options, BOUNDS);
    checkOptions({ requestId }, ["requestId"]);
    const method = GenerationServiceService.cancelGeneration;
    await within(this.#scope(options), async (scope) => {
      for (const where of await this.#directory.addresses(scope)) {
        try {
          await askAgent(this.#context.channels, where, scope, CALL_SECONDS, method, { requestId });
        } catch (error) {
          // A dead agent runs nothing.
          if (!(error instanceof DragomanError && error.reason === "no_agent")) {
            throw error;
          }
        }
      }
    });
  }

  /** Names of the served models. */
  async models(options: CallOptions = {}): Promise<string[]> {
    checkOptions(options, BOUNDS);
    return within(this.#scope(options), (scope) => this.#directory.models(scope));
  }

  /** Every agent with its state and load, as the controller sees it. */
  async agents(options: CallOptions = {}): Promise<readonly FleetMember[]> {
    checkOptions(options, BOUNDS);
    return within(this.#scope(options), (scope) => this.#directory.members(scope));
  }

  /** Measured profile of an agent's device, and every device that was looked at. Without an id: of the only agent. */
  async hardware(agentId?: string, options: CallOptions = {}): Promise<GetHardwareResponse> {
    checkOptions(options, BOUNDS);
    return within(this.#scope(options), async (scope) => {
      const where = await this.#directory.agentById(agentId, scope);
      return askAgent(this.#context.channels, where, scope, CALL_SECONDS, HardwareServiceService.getHardware, {});
    });
  }

  /** Load of each agent now: running and waiting requests, free KV blocks, step time. */
  async load(options: CallOptions = {}): Promise<readonly AgentLoadSample[]> {
    checkOptions(options, BOUNDS);
    return within(this.#scope(options), (scope) => this.#directory.load(scope));
  }

  #scope({ signal, deadlineSeconds }: CallOptions): Scope {
    return new Scope(this.#live, signal, deadlineSeconds);
  }

  /** Resolves the model, renders a conversation, and builds the messages. */
  async #prepare(prompt: Prompt, options: GenerateOptions, scope: Scope): Promise<Prepared> {
    const model = await this.#directory.resolve(options.model, scope);
    if (!isConversation(prompt)) {
      return prepare(prompt, options, model, this.#tenant);
    }
    const rendered = await this.#atAgentOf(model, scope, TokenizerServiceService.applyTemplate, () => ({
      model,
      messages: [...prompt],
      addGenerationPrompt: undefined,
      continueFinalMessage: false,
    }));
    return prepare(rendered.tokenIds?.ids ?? [], options, model, this.#tenant);
  }

  /** Calls the tokenizer of an agent that serves the model. */
  async #atAgentOf<Q, R>(
    given: string | undefined,
    scope: Scope,
    method: Method<Q, R>,
    request: (model: string) => Q,
  ): Promise<R> {
    const model = await this.#directory.resolve(given, scope);
    const where = await this.#directory.agentOf(model, scope);
    return askAgent(this.#context.channels, where, scope, CALL_SECONDS, method, request(model));
  }

  #embedding(
    inputs: readonly (string | readonly number[])[],
    asked: Pick<EmbedRequest, "model" | "dimensions" | "promptName" | "instruction">,
  ): { request: EmbedRequest; acquire: AcquireTicketRequest } {
    const prepared = inputs.map((input) => prepare(input, {}, asked.model, this.#tenant));
    const requestId = randomUUID();
    const request: EmbedRequest = {
      requestId,
      ticketToken: Buffer.alloc(0),
      inputs: prepared.map(({ generate }) => ({ input: generate.prompt })),
      ...asked,
    };
    const acquire = AcquireTicketRequest.fromPartial({
      requestId,
      model: asked.model,
      tenant: this.#tenant,
      numInputs: prepared.length,
      maxOutputTokens: 1,
      promptBytes: prepared.reduce((sum, { acquire }) => sum + acquire.promptBytes, 0n),
      promptDigest: digestOfInputs(prepared.map(({ acquire }) => acquire.promptDigest)),
    });
    return { request, acquire };
  }
}
