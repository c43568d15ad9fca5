/** What bounds a call: the caller's signal, the life of the client, and the time at which it is over anyway. */

import { setTimeout as sleep } from "node:timers/promises";

import { monotonicSeconds } from "./durations.js";
import { DragomanError, late } from "./errors.js";

// A longer timer would fire at once.
const MAX_TIMER_SECONDS = 2_000_000;

/** Owner of the end of one call. Whoever runs the call attaches it, and detaches it when the call is over. */
export class Scope {
  readonly #controller = new AbortController();
  readonly #caller: AbortSignal | undefined;
  readonly #until: number | undefined;
  readonly #live: Set<Scope>;
  readonly #onAbort = (): void => {
    this.abort(new DragomanError("cancelled", "the caller cancelled", { cause: this.#caller?.reason }));
  };

  /** `live`: the scopes of a client, which it aborts when it is closed. `seconds`: from now on. */
  constructor(live: Set<Scope>, caller: AbortSignal | undefined, seconds: number | undefined) {
    this.#live = live;
    this.#caller = caller;
    this.#until = seconds === undefined ? undefined : monotonicSeconds() + seconds;
  }

  /** Aborted when the call is to end; its reason is the DragomanError to end with. */
  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  /** When it is over anyway, by the monotonic clock. */
  get until(): number | undefined {
    return this.#until;
  }

  attach(): void {
    if (this.#caller?.aborted) {
      this.#onAbort();
    }
    this.#caller?.addEventListener("abort", this.#onAbort, { once: true });
    this.#live.add(this);
  }

  detach(): void {
    this.#caller?.removeEventListener("abort", this.#onAbort);
    this.#live.delete(this);
  }

  /** Ends what runs within it with `error`; the first one stays. */
  abort(error: DragomanError): void {
    this.#controller.abort(error);
  }

  /** Throws when it was aborted. */
  throwIfAborted(): void {
    this.signal.throwIfAborted();
  }

  /** Seconds left until the deadline; undefined where there is none. Throws when it is over. */
  remaining(): number | undefined {
    this.throwIfAborted();
    if (this.#until === undefined) {
      return undefined;
    }
    const left = this.#until - monotonicSeconds();
    if (left <= 0) {
      throw late();
    }
    return left;
  }

  /** Waits for `done`, which does not fail; throws when the scope is over before. */
  async wait(done: Promise<unknown>): Promise<void> {
    const left = Math.min(this.remaining() ?? Infinity, MAX_TIMER_SECONDS);
    const settled = new AbortController();
    const signal = AbortSignal.any([this.signal, settled.signal]);
    await Promise.race([done, sleep(left * 1000, undefined, { signal }).catch(() => undefined)]);
    settled.abort();
    this.remaining();
  }

  /** Waits; throws when it is aborted before. */
  async sleep(seconds: number): Promise<void> {
    try {
      await sleep(Math.min(seconds, MAX_TIMER_SECONDS) * 1000, undefined, { signal: this.signal });
    } catch {
      this.throwIfAborted();
    }
  }
}

/** Runs `call` within a scope of its own. */
export async function within<R>(scope: Scope, call: (scope: Scope) => Promise<R>): Promise<R> {
  scope.attach();
  try {
    return await call(scope);
  } finally {
    scope.detach();
  }
}
