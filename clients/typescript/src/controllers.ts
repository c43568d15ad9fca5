/** The controllers of a cell, any of which answers: one is asked until it fails, then the next. */

import { DragomanError, invalid, TransportError } from "./errors.js";

/** Owner of which controller is asked now. Everything of one client moves on together. */
export class Controllers {
  readonly #addresses: readonly string[];
  #index = 0;

  /** `addresses`: host:port, several with commas, in the order in which they are tried. */
  constructor(addresses: string) {
    this.#addresses = [...new Set(addresses.split(",").map((address) => address.trim()))].filter(Boolean);
    if (this.#addresses.length === 0) {
      throw invalid("controller", "the address is empty; give host:port, several with commas");
    }
  }

  /** The one to ask. */
  get current(): string {
    return this.#addresses[this.#index] ?? "";
  }

  /** The answer of `call(address)`; a controller that is away or shutting down is passed over, each one once. */
  async ask<R>(call: (address: string) => Promise<R>): Promise<R> {
    for (let left = this.#addresses.length - 1; left > 0; left -= 1) {
      const address = this.current;
      try {
        return await call(address);
      } catch (error) {
        if (!isAway(error)) {
          throw error;
        }
        // Late news of one that is no longer asked changes nothing.
        if (address === this.current) {
          this.#index = (this.#index + 1) % this.#addresses.length;
        }
      }
    }
    return call(this.current);
  }
}

function isAway(error: unknown): boolean {
  return error instanceof TransportError || (error instanceof DragomanError && error.reason === "agent_draining");
}
