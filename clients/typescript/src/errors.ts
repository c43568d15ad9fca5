/** The error of every failure, with a reason of the one catalogue, and how it is read from a failed call. */

import { type Metadata, type ServiceError, status } from "@grpc/grpc-js";

import { ErrorDetail } from "../gen/dragoman/v1/error.js";
import { catalogue, type ReasonName, type Traits } from "./catalogue.js";
import { secondsOf } from "./durations.js";

/** Trailing metadata in which servers put the detail of a failed call. */
const ERROR_KEY = "dragoman-error-bin";

/** Why a call failed. A reason of a newer version is named by its number and counts as internal. */
export type Reason = ReasonName | `unknown_${string}`;

const NAMES = new Map<number, ReasonName>(
  (Object.keys(catalogue) as ReasonName[]).map((name) => [catalogue[name].number, name]),
);

function isKnown(reason: Reason): reason is ReasonName {
  return Object.hasOwn(catalogue, reason);
}

/** The name of a reason on the wire. */
export function reasonOf(number: number): Reason {
  return NAMES.get(number) ?? `unknown_${String(number)}`;
}

/** The catalogue's entry of a reason. */
export function traitsOf(reason: Reason): Traits {
  return isKnown(reason) ? catalogue[reason] : catalogue.internal;
}

/** What an error may say besides its reason and message. */
export interface ErrorFacts {
  /** How long the server asks to wait, in seconds. */
  readonly retryDelaySeconds?: number | undefined;
  /** Facts such as "param", the path of a bad field. */
  readonly metadata?: Readonly<Record<string, string>> | undefined;
  /** What ended the call, where that was the caller's own signal. */
  readonly cause?: unknown;
}

/** Every failure of this package. `message` says what happened, why, and what to do. */
export class DragomanError extends Error {
  override readonly name: string = "DragomanError";
  readonly reason: Reason;
  readonly retryDelaySeconds: number | undefined;
  readonly metadata: Readonly<Record<string, string>>;

  constructor(reason: Reason, message: string, facts: ErrorFacts = {}) {
    super(message, facts.cause === undefined ? undefined : { cause: facts.cause });
    this.reason = reason;
    this.retryDelaySeconds = facts.retryDelaySeconds;
    this.metadata = { ...facts.metadata };
  }

  /** Whether the same request may succeed later or elsewhere. */
  get retryable(): boolean {
    return traitsOf(this.reason).retryable;
  }

  /** Canonical gRPC code of the reason. */
  get grpcCode(): number {
    return traitsOf(this.reason).grpcCode;
  }

  /** HTTP status of the reason. */
  get httpStatus(): number {
    return traitsOf(this.reason).httpStatus;
  }

  /** What the caller should do, in one sentence. */
  get remedy(): string {
    return traitsOf(this.reason).remedy;
  }
}

/** A failure of which the transport tells, not a server. `refused`: nobody listens at the address. */
export class TransportError extends DragomanError {
  readonly refused: boolean;

  constructor(reason: ReasonName, message: string, refused: boolean) {
    super(reason, message);
    this.refused = refused;
  }
}

/** The error of a bad argument. */
export function invalid(param: string, message: string): DragomanError {
  return new DragomanError("invalid_request", `${param}: ${message}`, { metadata: { param } });
}

/** The error of a deadline that passed. */
export function late(message = "the deadline of the request passed"): DragomanError {
  return new DragomanError("deadline_exceeded", message);
}

/** The error of a received detail. */
export function fromDetail(detail: ErrorDetail | undefined): DragomanError {
  if (detail === undefined) {
    return new DragomanError("unspecified", "the server said that the request failed, and not why");
  }
  return new DragomanError(reasonOf(detail.reason), detail.message, {
    retryDelaySeconds: detail.retryDelay && secondsOf(detail.retryDelay),
    metadata: detail.metadata,
  });
}

/** The server's own word on a failure; undefined where only the transport has spoken. */
export function detailIn(trailer: Metadata): DragomanError | undefined {
  const raw = trailer.get(ERROR_KEY)[0];
  if (raw === undefined) {
    return undefined;
  }
  try {
    return fromDetail(ErrorDetail.decode(typeof raw === "string" ? Buffer.from(raw) : raw));
  } catch (error) {
    return new DragomanError("internal", `the server sent an error that cannot be read: ${String(error)}`);
  }
}

/** Whether a value that was thrown is the failure of a call. */
export function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && typeof error.code === "number" && "metadata" in error;
}

const NEAREST = new Map<status, ReasonName>([
  [status.CANCELLED, "cancelled"],
  [status.DEADLINE_EXCEEDED, "deadline_exceeded"],
  [status.INVALID_ARGUMENT, "invalid_request"],
  [status.UNIMPLEMENTED, "unimplemented"],
  [status.UNAVAILABLE, "agent_lost"],
  [status.RESOURCE_EXHAUSTED, "request_too_large"],
  [status.UNAUTHENTICATED, "invalid_api_key"],
  [status.PERMISSION_DENIED, "permission_denied"],
  [status.NOT_FOUND, "model_not_served"],
]);

/** The error of a status without a detail: the nearest reason of its code. */
export function fromStatus(error: ServiceError): DragomanError {
  return new DragomanError(NEAREST.get(error.code) ?? "internal", error.details || nameOf(error.code));
}

/** What the transport says, without the layers it wraps around a connection that nobody accepts. */
export function plainDetails(error: ServiceError): { text: string; refused: boolean } {
  if (error.details.includes("ECONNREFUSED")) {
    return { text: "connection refused", refused: true };
  }
  return { text: error.details || nameOf(error.code), refused: false };
}

function nameOf(code: number): string {
  return (status as Readonly<Record<number, string | undefined>>)[code] ?? `status ${String(code)}`;
}
