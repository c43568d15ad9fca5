/** Calls as promises: a unary answer, and the messages of a stream one after the other, ended by a scope. Knows no reasons. */

import { type CallOptions, type Client, type ClientReadableStream, Metadata, type ServiceError } from "@grpc/grpc-js";

import type { Scope } from "./scope.js";

/** A method of a generated service definition. */
export interface Method<Q, R> {
  readonly path: string;
  readonly requestSerialize: (request: Q) => Buffer;
  readonly responseDeserialize: (bytes: Buffer) => R;
}

/** When a call is cut, `seconds` from now; never where undefined. */
function cutAfter(seconds: number | undefined): CallOptions {
  return seconds === undefined ? {} : { deadline: Date.now() + seconds * 1000 };
}

/** The answer of a unary call. Throws a ServiceError. */
export function unary<Q, R>(
  client: Client,
  method: Method<Q, R>,
  request: Q,
  scope: Scope,
  seconds: number,
): Promise<R> {
  return new Promise((resolve, reject) => {
    const { path, requestSerialize, responseDeserialize } = method;
    const options = cutAfter(seconds);
    const cancel = (): void => {
      call.cancel();
    };
    const done = (error: ServiceError | null, response?: R): void => {
      scope.signal.removeEventListener("abort", cancel);
      if (error) {
        reject(error);
      } else {
        resolve(response as R);
      }
    };
    const call = client.makeUnaryRequest(
      path,
      requestSerialize,
      responseDeserialize,
      request,
      new Metadata(),
      options,
      done,
    );
    scope.signal.addEventListener("abort", cancel, { once: true });
  });
}

/** Opens a stream of messages that is cut `seconds` from now. */
export function open<Q, R>(
  client: Client,
  method: Method<Q, R>,
  request: Q,
  scope: Scope,
  seconds: number | undefined,
): Reader<R> {
  const { path, requestSerialize, responseDeserialize } = method;
  const options = cutAfter(seconds);
  return new Reader(
    client.makeServerStreamRequest(path, requestSerialize, responseDeserialize, request, new Metadata(), options),
    scope,
  );
}

/** Reads a stream of messages. The scope's end cancels it; a reader that does not read lets the sender wait. */
export class Reader<R> {
  readonly #call: ClientReadableStream<R>;
  readonly #scope: Scope;
  #failure: ServiceError | undefined;
  #ended = false;
  #wake: (() => void) | undefined;
  readonly #cancel = (): void => {
    this.#call.cancel();
  };

  constructor(call: ClientReadableStream<R>, scope: Scope) {
    this.#call = call;
    this.#scope = scope;
    scope.signal.addEventListener("abort", this.#cancel, { once: true });
    call.on("readable", () => {
      this.#wake?.();
    });
    call.on("end", () => {
      this.#over(undefined);
    });
    call.on("error", (error: ServiceError) => {
      this.#over(error);
    });
  }

  /** The next message, undefined after the last one. Throws a ServiceError when the call failed. */
  async next(): Promise<R | undefined> {
    for (;;) {
      const message = this.#call.read() as R | null;
      if (message !== null) {
        return message;
      }
      if (this.#failure) {
        throw this.#failure;
      }
      if (this.#ended) {
        return undefined;
      }
      await new Promise<void>((wake) => {
        this.#wake = wake;
      });
    }
  }

  /** Cancels the call. What it still says is not heard. */
  cancel(): void {
    this.#scope.signal.removeEventListener("abort", this.#cancel);
    this.#call.cancel();
  }

  #over(failure: ServiceError | undefined): void {
    this.#scope.signal.removeEventListener("abort", this.#cancel);
    this.#failure ??= failure;
    this.#ended = true;
    this.#wake?.();
  }
}

/** The first message of a stream, which is then cancelled; undefined where there is none. Throws a ServiceError. */
export async function first<Q, R>(
  client: Client,
  method: Method<Q, R>,
  request: Q,
  scope: Scope,
  seconds: number,
): Promise<R | undefined> {
  const reader = open(client, method, request, scope, seconds);
  try {
    return await reader.next();
  } finally {
    reader.cancel();
  }
}
