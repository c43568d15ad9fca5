/** Where a request may go: tickets from a controller, or one open agent that takes requests without. */

import { createHash } from "node:crypto";

import { type Client, status } from "@grpc/grpc-js";

import {
  AdmissionServiceService,
  type AcquireTicketRequest,
  type LatencyQuote,
  Ticket,
} from "../gen/dragoman/v1/admission_service.js";
import { type Method, unary } from "./calls.js";
import type { Address, Channels } from "./channels.js";
import { Controllers } from "./controllers.js";
import { detailIn, fromStatus, isServiceError, late, plainDetails, TransportError } from "./errors.js";
import { Scope, within } from "./scope.js";

/** The longest wait for a call that does not wait for capacity. */
export const CALL_SECONDS = 30;
/** The longest wait in the controller's queue, or for embeddings, when the request does not bound it sooner. */
export const QUEUE_SECONDS = 600;
// How long a client that is closed waits for tickets on their way back.
const RELEASE_SECONDS = 1;

/** Tickets in the order in which they are to be tried. */
export interface Grant {
  readonly tickets: readonly [Ticket, ...Ticket[]];
  readonly quote: LatencyQuote | undefined;
}

/** Grants requests. */
export interface Admission {
  /** Waits for capacity. Throws DragomanError. */
  acquire(request: AcquireTicketRequest, scope: Scope): Promise<Grant>;
  /** Returns a ticket that was not used, in the background; one that cannot be returned expires by itself. */
  release(ticket: Ticket): void;
  /** Waits shortly for the tickets on their way back. */
  close(): Promise<void>;
}

/** One agent that was started with --open: every request goes to it, without a ticket. */
export class OpenAgent implements Admission {
  readonly #grant: Grant;

  constructor(target: string) {
    this.#grant = { tickets: [Ticket.fromPartial({ dataAddress: target })], quote: undefined };
  }

  acquire(): Promise<Grant> {
    return Promise.resolve(this.#grant);
  }

  release(): void {
    // There is nothing to return.
  }

  close(): Promise<void> {
    return Promise.resolve();
  }
}

/** Tickets from the controllers of a cell. */
export class ControllerAdmission implements Admission {
  readonly #channels: Channels;
  readonly #controllers: Controllers;
  readonly #live: Set<Scope>;
  readonly #releases = new Set<Promise<void>>();

  constructor(channels: Channels, controllers: Controllers, live: Set<Scope>) {
    this.#channels = channels;
    this.#controllers = controllers;
    this.#live = live;
  }

  async acquire(request: AcquireTicketRequest, scope: Scope): Promise<Grant> {
    // Until a ticket is back, asking again gives the same one.
    if (this.#releases.size > 0) {
      await scope.wait(Promise.all(this.#releases));
    }
    const granted = await askController(
      this.#channels,
      this.#controllers,
      scope,
      QUEUE_SECONDS,
      AdmissionServiceService.acquireTicket,
      request,
    );
    const first = granted.ticket ?? Ticket.fromPartial({});
    return { tickets: granted.fallbackTicket ? [first, granted.fallbackTicket] : [first], quote: granted.quote };
  }

  release(ticket: Ticket): void {
    const release = this.#release(ticket).finally(() => this.#releases.delete(release));
    this.#releases.add(release);
  }

  async close(): Promise<void> {
    const shortly = new Scope(this.#live, undefined, RELEASE_SECONDS);
    await shortly.wait(Promise.all(this.#releases)).catch(() => undefined);
  }

  async #release({ token }: Ticket): Promise<void> {
    const target = this.#controllers.current;
    try {
      await within(new Scope(this.#live, undefined, CALL_SECONDS), (scope) =>
        askController(
          this.#channels,
          new Controllers(target),
          scope,
          CALL_SECONDS,
          AdmissionServiceService.releaseTicket,
          {
            token,
          },
        ),
      );
    } catch {
      // It expires by itself.
    }
  }
}

/** Who is asked, as errors name it. */
export interface Party {
  readonly name: string;
  readonly remedy: string;
}

export const CONTROLLER: Party = { name: "controller", remedy: "start one with 'dragoman up', or give its address" };
export const AGENT: Party = { name: "agent", remedy: "see 'dragoman ps' for the agents that are up" };

/** The answer of a unary call to the first controller that gives one. Throws DragomanError. */
export function askController<Q, R>(
  channels: Channels,
  controllers: Controllers,
  scope: Scope,
  seconds: number,
  method: Method<Q, R>,
  request: Q,
): Promise<R> {
  return controllers.ask((target) =>
    ask(channels, { target, agentId: "" }, CONTROLLER, scope, seconds, (client, left) =>
      unary(client, method, request, scope, left),
    ),
  );
}

/** The answer of a unary call to an agent. Throws DragomanError. */
export function askAgent<Q, R>(
  channels: Channels,
  where: Address,
  scope: Scope,
  seconds: number,
  method: Method<Q, R>,
  request: Q,
): Promise<R> {
  return ask(channels, where, AGENT, scope, seconds, (client, left) => unary(client, method, request, scope, left));
}

/** The answer of `call(client, left)`, which has `left` seconds, `seconds` at most. Throws DragomanError. */
export async function ask<R>(
  channels: Channels,
  where: Address,
  party: Party,
  scope: Scope,
  seconds: number,
  call: (client: Client, left: number) => Promise<R>,
): Promise<R> {
  try {
    const client = await channels.connect(where, scope);
    return await call(client, Math.min(scope.remaining() ?? seconds, seconds));
  } catch (error) {
    scope.throwIfAborted();
    throw answerOf(error, where, party);
  }
}

/** The DragomanError of a unary call that failed. */
function answerOf(error: unknown, where: Address, { name, remedy }: Party): unknown {
  if (!isServiceError(error)) {
    return error;
  }
  const said = detailIn(error.metadata);
  if (said !== undefined) {
    return said;
  }
  if (error.code === status.UNAVAILABLE) {
    const { text, refused } = plainDetails(error);
    return new TransportError("no_agent", `cannot reach the ${name} at ${where.target}: ${text}; ${remedy}`, refused);
  }
  if (error.code === status.DEADLINE_EXCEEDED) {
    return late(`the ${name} at ${where.target} did not answer in time`);
  }
  return fromStatus(error);
}

/** What a ticket binds of a prompt sent as text: SHA-256 of its UTF-8. */
export function digestOfText(text: string): Buffer {
  return createHash("sha256").update(text, "utf8").digest();
}

/** What a ticket binds of a prompt sent as ids: SHA-256 of them as little-endian words. */
export function digestOfTokens(ids: readonly number[]): Buffer {
  const words = Buffer.allocUnsafe(4 * ids.length);
  ids.forEach((id, index) => words.writeUInt32LE(id, 4 * index));
  return createHash("sha256").update(words).digest();
}

/** What a ticket binds of an embedding request. */
export function digestOfInputs(digests: readonly Buffer[]): Buffer {
  const [only] = digests;
  if (digests.length === 1 && only !== undefined) {
    return only;
  }
  return createHash("sha256").update(Buffer.concat(digests)).digest();
}
