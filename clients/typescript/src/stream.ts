/** One generation as the client follows it: admission, an agent's stream, fallback, resume at the last cursor, one end. */

import { randomBytes } from "node:crypto";

import type { AcquireTicketRequest, Ticket } from "../gen/dragoman/v1/admission_service.js";
import type { GenerateRequest, GenerationFinished, GenerationStarted } from "../gen/dragoman/v1/generation_service.js";
import { Attempt, isFinished, lost } from "./attempt.js";
import type { Channels } from "./channels.js";
import { durationOf, monotonicSeconds, secondsOf } from "./durations.js";
import { DragomanError, invalid } from "./errors.js";
import { CursorGapError, Progress } from "./progress.js";
import type { Prepared } from "./request.js";
import { type GenerationResult, logprobsOf, type Quote, quoteOf, type Token } from "./results.js";
import { mayPass, Pursuit, type RetryBudget, type RetryPolicy } from "./retry.js";
import type { Scope } from "./scope.js";
import type { Admission } from "./ticket.js";

/** What a client shares with its streams. */
export interface Context {
  readonly channels: Channels;
  readonly admission: Admission;
  readonly policy: RetryPolicy;
  readonly budget: RetryBudget;
}

/** Makes the request when the stream is first read; may ask an agent for the chat template or the model's name. */
export type Prepare = (scope: Scope) => Promise<Prepared>;

/**
 * Iterates over `Token`, once. Leaving the loop, or `close`, cancels what still runs.
 *
 * Nothing is sent before the first item is asked for. An agent that dies is replaced and the stream goes on at the next token,
 * at most 3 times; the reader only sees a pause. Errors are DragomanError.
 */
export class GenerationStream implements AsyncIterable<Token>, AsyncDisposable {
  readonly #context: Context;
  readonly #prepare: Prepare;
  readonly #scope: Scope;
  readonly #began = monotonicSeconds();
  readonly #pursuit: Pursuit;
  #request: Prepared | undefined;
  #progress = new Progress(1);
  #quote: Quote | undefined;
  #ticket: Ticket | undefined;
  #attempt: Attempt | undefined;
  #firstStarted: GenerationStarted | undefined;
  #seed: bigint | undefined;
  #finished: GenerationFinished | undefined;
  #error: DragomanError | undefined;
  #origin: Ticket | undefined;
  #firstTokenTime: number | undefined;
  #endTime: number | undefined;
  #reading = false;

  /** @internal Streams come from `Client.generate`. */
  constructor(context: Context, prepare: Prepare, scope: Scope) {
    this.#context = context;
    this.#prepare = prepare;
    this.#scope = scope;
    this.#pursuit = new Pursuit(context.policy);
  }

  /** Id of the request; undefined until the first item was asked for. */
  get requestId(): string | undefined {
    return this.#request?.generate.requestId;
  }

  /** The agent that runs it now; undefined before it is placed, "" for an open agent. */
  get agentId(): string | undefined {
    return this.#ticket?.agentId;
  }

  /** Data address of that agent. */
  get agentAddress(): string | undefined {
    return this.#ticket?.dataAddress;
  }

  /** How often it was continued after a cut. */
  get numResumes(): number {
    return this.#pursuit.numResumes;
  }

  /** What the controller promised; undefined until it is placed and for an open agent. */
  get quote(): Quote | undefined {
    return this.#quote;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Token, void, undefined> {
    if (this.#reading) {
      throw invalid("stream", "has one reader; do not iterate over it twice at once");
    }
    this.#reading = true;
    this.#scope.attach();
    try {
      for (let token = await this.#next(); token !== undefined; token = await this.#next()) {
        yield token;
      }
    } finally {
      this.#reading = false;
      this.close();
      this.#scope.detach();
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
    await Promise.resolve();
  }

  /** Reads what is left and returns the whole. Throws DragomanError; `cancelled` when it was closed before its end. */
  async result(): Promise<GenerationResult> {
    // eslint-disable-next-line @typescript-eslint/no-unused-vars -- every item is in the result
    for await (const _ of this);
    return this.#result();
  }

  /** As `result`, only the text of the first choice. */
  async text(): Promise<string> {
    return (await this.result()).text;
  }

  /** Cancels what still runs. May be called at any time, and more than once. */
  close(): void {
    this.#endTime ??= monotonicSeconds();
    if (!this.#over) {
      this.#error ??= new DragomanError("cancelled", "the stream was closed before its end");
      this.#scope.abort(this.#error);
    }
    this.#dropAttempt();
  }

  get #over(): boolean {
    return this.#finished !== undefined || this.#progress.complete;
  }

  async #next(): Promise<Token | undefined> {
    while (this.#error === undefined && !this.#over) {
      try {
        const token = await this.#advance();
        if (token !== undefined) {
          return token;
        }
      } catch (error) {
        const accepted = this.#attempt !== undefined;
        this.#dropAttempt();
        await this.#recover(error, accepted);
      }
    }
    if (this.#error !== undefined) {
      throw this.#error;
    }
    await this.#readEnd();
    return undefined;
  }

  /** Takes one event, after having the request accepted where it is not. */
  async #advance(): Promise<Token | undefined> {
    this.#attempt ??= await this.#start();
    const { ticket } = this.#attempt;
    const event = await this.#attempt.read();
    if (isFinished(event)) {
      if (!this.#progress.complete) {
        throw lost(ticket, "finished the request before all its choices had ended");
      }
      this.#finished = event;
      return undefined;
    }
    try {
      const token = this.#progress.take(event);
      if (token !== undefined) {
        this.#firstTokenTime ??= monotonicSeconds();
        this.#pursuit.flowed();
      }
      return token;
    } catch (error) {
      throw error instanceof CursorGapError ? lost(ticket, `sent a frame that does not fit: ${error.message}`) : error;
    }
  }

  /** Has the request admitted and accepted: by the first agent, or by the second where the first refuses. */
  async #start(): Promise<Attempt> {
    const { admission } = this.#context;
    if (this.#request === undefined) {
      this.#request = await this.#prepare(this.#scope);
      this.#progress = new Progress(this.#request.generate.sampling?.numChoices ?? 1);
    }
    const grant = await admission.acquire(this.#acquireMessage(this.#request.acquire), this.#scope);
    this.#quote ??= quoteOf(grant.quote, grant.tickets[0].agentId);
    const request = this.#generateMessage(this.#request.generate);
    let failure: unknown;
    for (const ticket of grant.tickets) {
      this.#ticket = ticket;
      try {
        const attempt = await Attempt.open(this.#context.channels, ticket, request, this.#scope);
        this.#tookStart(attempt.started);
        return attempt;
      } catch (error) {
        admission.release(ticket);
        failure ??= error;
        if (!(error instanceof DragomanError) || !mayPass(error, this.#origin !== undefined)) {
          throw error;
        }
      }
    }
    throw failure;
  }

  #tookStart(started: GenerationStarted): void {
    this.#firstStarted ??= started;
    this.#seed = started.seed;
    this.#pursuit.started();
    this.#context.budget.succeeded();
  }

  #acquireMessage(acquire: AcquireTicketRequest): AcquireTicketRequest {
    const message = { ...acquire };
    const remaining = this.#scope.remaining();
    if (remaining !== undefined) {
      message.deadline = durationOf(remaining);
    }
    if (this.#origin !== undefined) {
      message.resume = {
        originEpoch: this.#origin.epoch,
        originAgentId: this.#origin.agentId,
        attempt: this.numResumes,
        fromCursor: BigInt(this.#progress.numTokens),
      };
    }
    return message;
  }

  #generateMessage(generate: GenerateRequest): GenerateRequest {
    if (this.#origin === undefined) {
      return generate;
    }
    // Where it was lost before the agent named the seed it drew, nothing was delivered: any will do.
    this.#seed ??= generate.sampling?.seed ?? randomBytes(8).readBigUInt64LE() >> 1n;
    return { ...generate, resume: this.#progress.resumeState(this.numResumes, this.#origin.epoch, this.#seed) };
  }

  /** Waits until the request may be tried again, or makes `error` the end of the stream. */
  async #recover(error: unknown, accepted: boolean): Promise<void> {
    if (this.#scope.signal.aborted) {
      this.#error ??= this.#scope.signal.reason as DragomanError;
      return;
    }
    if (!(error instanceof DragomanError)) {
      throw error;
    }
    const { cut } = this.#pursuit;
    const decision = this.#pursuit.failed(error, {
      accepted,
      hasOrigin: this.#ticket !== undefined,
      now: monotonicSeconds(),
      deadline: this.#scope.until,
      chance: Math.random(),
    });
    if (decision.step === "give up" || !this.#context.budget.spend()) {
      this.#error ??= notResumed(cut, error);
      return;
    }
    if (decision.step === "resume") {
      this.#origin = this.#ticket;
    }
    await this.#scope.sleep(decision.delaySeconds).catch((reason: unknown) => {
      this.#error ??= reason as DragomanError;
    });
  }

  /** Reads the usage after the last token. All tokens are here, so an agent lost now costs only its figures. */
  async #readEnd(): Promise<void> {
    if (this.#attempt !== undefined && this.#finished === undefined) {
      try {
        const event = await this.#attempt.read();
        this.#finished = isFinished(event) ? event : undefined;
      } catch {
        // The figures are not told.
      }
    }
    this.#endTime ??= monotonicSeconds();
  }

  #dropAttempt(): void {
    this.#attempt?.cancel();
    this.#attempt = undefined;
  }

  #result(): GenerationResult {
    const choices = this.#progress.results();
    const finished = this.#finished;
    const end = this.#endTime ?? this.#began;
    return {
      requestId: this.requestId ?? "",
      model: this.#request?.generate.model ?? "",
      text: choices[0]?.text ?? "",
      choices,
      usage: {
        promptTokens: this.#firstStarted?.promptTokens ?? 0,
        cachedTokens: finished?.usage?.cachedTokens ?? 0,
        // Counted here: an agent that took over counts only from its own start.
        outputTokens: this.#progress.numTokens,
      },
      timings: {
        queueSeconds: finished?.queueTime && secondsOf(finished.queueTime),
        timeToFirstTokenSeconds: finished?.timeToFirstToken && secondsOf(finished.timeToFirstToken),
        totalSeconds: finished?.totalTime && secondsOf(finished.totalTime),
        clientTimeToFirstTokenSeconds:
          this.#firstTokenTime === undefined ? undefined : this.#firstTokenTime - this.#began,
        clientTotalSeconds: end - this.#began,
      },
      seed: this.#seed ?? 0n,
      agentId: this.agentId ?? "",
      numResumes: this.numResumes,
      quote: this.quote,
      promptLogprobs: logprobsOf(this.#firstStarted?.promptLogprobs ?? []),
    };
  }
}

/** The end of a stream: when it had been cut, what cut it comes first. */
function notResumed(cut: DragomanError | undefined, error: DragomanError): DragomanError {
  if (cut === undefined || error === cut) {
    return error;
  }
  const message = `the stream was cut (${cut.message}) and could not be resumed: ${error.message}`;
  return new DragomanError(error.reason, message, error);
}
