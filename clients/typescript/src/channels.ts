/** One connection an address, with the gRPC options of Dragoman, each with its reason. */

import {
  type ChannelCredentials,
  type ChannelInterface,
  type ChannelOptions,
  Client,
  connectivityState,
  credentials as grpcCredentials,
  Metadata,
  type ServiceError,
  status,
} from "@grpc/grpc-js";

import { DragomanError, late } from "./errors.js";
import type { Scope } from "./scope.js";

const MAX_MESSAGE_BYTES = 16 << 20;
// The library itself never gives up a server that takes the connection and says nothing. It cannot be made to end that
// connection either: it stays until the server speaks, or the kernel gives it up.
const CONNECT_SECONDS = 5;

const OPTIONS: ChannelOptions = {
  // A silent peer is noticed within 4.5 + 2 s, on an idle connection too, so that the next request does not find it dead.
  "grpc.keepalive_time_ms": 4500,
  "grpc.keepalive_timeout_ms": 2000,
  "grpc.keepalive_permit_without_calls": 1,
  "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
  "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
  // What a reader that stalls can have in flight before the agent's write waits: about 1,000 tokens. It never grows here.
  "grpc-node.flow_control_window": 64 << 10,
  // A ticket is accepted once: only retry.ts may send a request again, with a new ticket.
  "grpc.enable_retries": 0,
  // An agent that restarts is found again within 2 s; the default backs off to 2 minutes.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 2000,
  // Agents are dialled at the address in the ticket; a proxy meant for the web would swallow loopback addresses.
  "grpc.enable_http_proxy": 0,
  // Connections of this client alone, so that its close ends them.
  "grpc.use_local_subchannel_pool": 1,
};

/** Where a server is dialled. With credentials, the certificate of an agent must name its id; "" for a controller. */
export interface Address {
  readonly target: string;
  readonly agentId: string;
}

/** Owner of the connections of one client. */
export class Channels {
  readonly #credentials: ChannelCredentials | undefined;
  readonly #open = new Map<string, Client>();
  readonly #connectSeconds: number;
  #closed = false;

  constructor(credentials: ChannelCredentials | undefined, connectSeconds = CONNECT_SECONDS) {
    this.#credentials = credentials;
    this.#connectSeconds = connectSeconds;
  }

  /** A connection that is up, or whose next call fails at once. Throws a ServiceError when the server stays silent. */
  async connect(where: Address, scope: Scope): Promise<Client> {
    const key = this.#credentials === undefined ? where.target : `${where.target} ${where.agentId}`;
    let client = this.#open.get(key);
    if (client === undefined) {
      client = this.#dial(where);
      this.#open.set(key, client);
    }
    if (!(await this.#isSettled(client.getChannel(), scope))) {
      this.#open.delete(key);
      client.close();
      throw unavailable(`no answer to the connection within ${String(this.#connectSeconds)} s`);
    }
    return client;
  }

  /** Closes all connections. */
  close(): void {
    this.#closed = true;
    for (const client of this.#open.values()) {
      client.close();
    }
    this.#open.clear();
  }

  #dial(where: Address): Client {
    if (this.#closed) {
      throw new DragomanError("cancelled", "the client is closed");
    }
    if (this.#credentials === undefined) {
      return new Client(where.target, grpcCredentials.createInsecure(), OPTIONS);
    }
    const named = where.agentId ? { "grpc.ssl_target_name_override": where.agentId } : {};
    return new Client(where.target, this.#credentials, { ...OPTIONS, ...named });
  }

  /** Whether the connection is up or has failed, waited for as long as the scope and #connectSeconds allow. */
  async #isSettled(channel: ChannelInterface, scope: Scope): Promise<boolean> {
    const left = scope.remaining() ?? Infinity;
    const limit = Date.now() + 1000 * Math.min(left, this.#connectSeconds);
    for (;;) {
      const state = channel.getConnectivityState(true);
      if (state !== connectivityState.IDLE && state !== connectivityState.CONNECTING) {
        return true;
      }
      if (Date.now() >= limit) {
        if (left <= this.#connectSeconds) {
          throw late();
        }
        return false;
      }
      await changed(channel, state, limit, scope.signal);
      scope.throwIfAborted();
    }
  }
}

/** Waits until the channel leaves `state`, until `limit`, or until the signal. */
function changed(
  channel: ChannelInterface,
  state: connectivityState,
  limit: number,
  signal: AbortSignal,
): Promise<void> {
  return new Promise((resolve) => {
    const settle = (): void => {
      signal.removeEventListener("abort", settle);
      resolve();
    };
    signal.addEventListener("abort", settle, { once: true });
    channel.watchConnectivityState(state, limit, settle);
  });
}

function unavailable(details: string): ServiceError {
  return Object.assign(new Error(details), { code: status.UNAVAILABLE, details, metadata: new Metadata() });
}
