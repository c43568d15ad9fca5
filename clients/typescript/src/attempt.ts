/** One stream at one agent: opened with a ticket, accepted, read to its one end. Knows nothing of retries. */

import { status } from "@grpc/grpc-js";

import type { Ticket } from "../gen/dragoman/v1/admission_service.js";
import {
  type GenerateRequest,
  type GenerateResponse,
  type GenerationDelta,
  type GenerationFinished,
  GenerationServiceService,
  type GenerationStarted,
} from "../gen/dragoman/v1/generation_service.js";
import { open, type Reader } from "./calls.js";
import type { Channels } from "./channels.js";
import { durationOf } from "./durations.js";
import {
  detailIn,
  type DragomanError,
  fromDetail,
  fromStatus,
  isServiceError,
  late,
  plainDetails,
  TransportError,
} from "./errors.js";
import type { Scope } from "./scope.js";

// The agent ends a request at its deadline by itself, with a reason; the transport cuts it this much later.
const DEADLINE_SLACK_SECONDS = 0.5;
// Statuses without a detail in which a connection or a process that went away shows itself.
const LOST_CODES = new Set([status.UNAVAILABLE, status.CANCELLED, status.UNKNOWN, status.INTERNAL]);

/** What an accepted stream brings: new tokens, or its end. */
export type AttemptEvent = GenerationDelta | GenerationFinished;

/** Whether an event is the end. */
export function isFinished(event: AttemptEvent): event is GenerationFinished {
  return "usage" in event;
}

/** A stream that an agent accepted. The owner calls `cancel` when it stops reading before the end. */
export class Attempt {
  readonly ticket: Ticket;
  readonly started: GenerationStarted;
  readonly #reader: Reader<GenerateResponse>;

  private constructor(ticket: Ticket, started: GenerationStarted, reader: Reader<GenerateResponse>) {
    this.ticket = ticket;
    this.started = started;
    this.#reader = reader;
  }

  /** Sends the request and waits until it is accepted. Throws DragomanError when it is refused or the agent is lost. */
  static async open(channels: Channels, ticket: Ticket, request: GenerateRequest, scope: Scope): Promise<Attempt> {
    const reader = await begin(channels, ticket, request, scope);
    try {
      const event = (await read(reader, ticket)).event;
      if (event?.$case === "failed") {
        throw fromDetail(event.value.error);
      }
      if (event?.$case !== "started") {
        throw lost(ticket, "sent tokens before it accepted the request");
      }
      if (ticket.epoch !== 0n && event.value.epoch !== ticket.epoch) {
        throw lost(ticket, "is in another life than the ticket is for");
      }
      return new Attempt(ticket, event.value, reader);
    } catch (error) {
      reader.cancel();
      throw error;
    }
  }

  /** The next event. Throws DragomanError when the request failed or the agent was lost. */
  async read(): Promise<AttemptEvent> {
    const { event } = await read(this.#reader, this.ticket);
    switch (event?.$case) {
      case "delta":
      case "finished":
        return event.value;
      case "failed":
        throw fromDetail(event.value.error);
      case "started":
        // A second start is the agent's next life, or another one behind the same address.
        throw lost(this.ticket, "started the request a second time");
      case undefined:
        throw lost(this.ticket, "sent an event that this version does not know");
    }
  }

  /** Cancels the request at the agent. */
  cancel(): void {
    this.#reader.cancel();
  }
}

/** The error of an agent that can no longer be trusted with this stream. `refused`: nobody listens there. */
export function lost(ticket: Ticket, what: string, refused = false): DragomanError {
  const name = ticket.agentId ? `${ticket.agentId} at ${ticket.dataAddress}` : `at ${ticket.dataAddress}`;
  return new TransportError("agent_lost", `the agent ${name} ${what}`, refused);
}

async function begin(
  channels: Channels,
  ticket: Ticket,
  request: GenerateRequest,
  scope: Scope,
): Promise<Reader<GenerateResponse>> {
  try {
    const client = await channels.connect({ target: ticket.dataAddress, agentId: ticket.agentId }, scope);
    const remaining = scope.remaining();
    const sent = { ...request, ticketToken: ticket.token };
    if (remaining !== undefined) {
      sent.deadline = durationOf(remaining);
    }
    const cut = remaining === undefined ? undefined : remaining + DEADLINE_SLACK_SECONDS;
    return open(client, GenerationServiceService.generate, sent, scope, cut);
  } catch (error) {
    throw failureOf(error, ticket);
  }
}

async function read(reader: Reader<GenerateResponse>, ticket: Ticket): Promise<GenerateResponse> {
  let response: GenerateResponse | undefined;
  try {
    response = await reader.next();
  } catch (error) {
    throw failureOf(error, ticket);
  }
  if (response === undefined) {
    throw lost(ticket, "ended the stream without saying how the request ended");
  }
  return response;
}

function failureOf(error: unknown, ticket: Ticket): unknown {
  if (!isServiceError(error)) {
    return error;
  }
  const said = detailIn(error.metadata);
  if (said !== undefined) {
    return said;
  }
  if (LOST_CODES.has(error.code)) {
    const { text, refused } = plainDetails(error);
    // An open agent is the only one there is.
    return lost(ticket, `cannot be reached: ${text}`, refused && ticket.agentId === "");
  }
  return error.code === status.DEADLINE_EXCEEDED ? late() : fromStatus(error);
}
