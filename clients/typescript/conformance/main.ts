/** The TypeScript client driven by the harness of clients/conformance; its README has the protocol. */

import { createInterface } from "node:readline";

import { credentials } from "@grpc/grpc-js";

import { Client, DragomanError, type RetryPolicy } from "../src/index.js";
import { type Call, play } from "./calls.js";
import { emit } from "./emit.js";

interface Instruction {
  readonly id: string;
  readonly controller?: string;
  readonly agent?: string;
  readonly tenant: string;
  readonly tls?: { readonly ca_pem: string; readonly certificate_pem: string; readonly key_pem: string };
  readonly retry: Readonly<Record<string, number>>;
  readonly calls: readonly Call[];
}

function policyOf(given: Instruction["retry"]): Partial<RetryPolicy> {
  const named = Object.entries(given).map(([name, value]) => [
    name.replace(/_(.)/g, (_, letter: string) => letter.toUpperCase()),
    value,
  ]);
  return Object.fromEntries(named) as Partial<RetryPolicy>;
}

function errorLine(error: DragomanError, seconds: number): Record<string, unknown> {
  return {
    event: "error",
    reason: error.reason,
    message: error.message,
    retryable: error.retryable,
    retry_delay_seconds: error.retryDelaySeconds ?? null,
    metadata: error.metadata,
    http_status: error.httpStatus,
    grpc_code: error.grpcCode,
    seconds,
  };
}

async function run({ controller, agent, tenant, tls, retry, calls }: Instruction): Promise<void> {
  await using client = new Client({
    controller,
    agent,
    tenant,
    retry: policyOf(retry),
    credentials:
      tls && credentials.createSsl(Buffer.from(tls.ca_pem), Buffer.from(tls.key_pem), Buffer.from(tls.certificate_pem)),
  });
  for (const [index, call] of calls.entries()) {
    const began = performance.now();
    try {
      await play(client, index, call);
    } catch (error) {
      if (!(error instanceof DragomanError)) {
        throw error; // every error of the client is one of its own
      }
      emit({ call: index, ...errorLine(error, (performance.now() - began) / 1000) });
    }
  }
}

emit({ event: "hello", protocol: 1, language: "typescript" });
for await (const line of createInterface({ input: process.stdin, crlfDelay: Infinity })) {
  const instruction = JSON.parse(line) as Instruction;
  await run(instruction);
  emit({ event: "done", id: instruction.id });
}
