import { createServer, type Server, type Socket } from "node:net";

import { DragomanError, type ErrorFacts, type Reason } from "../src/errors.js";

export function failed(reason: Reason, facts?: ErrorFacts): DragomanError {
  return new DragomanError(reason, "it went wrong", facts);
}

/** Whether a value is a DragomanError of that reason, and, where given, about that parameter. */
export function hasReason(reason: Reason, param?: string): (error: unknown) => boolean {
  return (error) =>
    error instanceof DragomanError &&
    error.reason === reason &&
    (param === undefined || (error.metadata["param"] === param && error.message.startsWith(`${param}: `)));
}

/** A server that takes every connection and never says a word. */
export class SilentServer implements AsyncDisposable {
  readonly #server: Server;
  readonly #sockets: Socket[] = [];
  #met: (() => void) | undefined;

  private constructor(server: Server) {
    this.#server = server;
    server.on("connection", (socket) => {
      this.#sockets.push(socket);
      this.#met?.();
    });
  }

  static async start(): Promise<SilentServer> {
    const server = createServer();
    await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
    return new SilentServer(server);
  }

  get address(): string {
    const bound = this.#server.address();
    return typeof bound === "object" && bound !== null ? `127.0.0.1:${String(bound.port)}` : "";
  }

  get numConnections(): number {
    return this.#sockets.length;
  }

  /** Waits for the first connection. */
  async met(): Promise<void> {
    while (this.#sockets.length === 0) {
      await new Promise<void>((resolve) => {
        this.#met = resolve;
      });
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const socket of this.#sockets) {
      socket.destroy();
    }
    await new Promise((resolve) => this.#server.close(resolve));
  }
}
