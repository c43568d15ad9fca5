import assert from "node:assert/strict";
import { test } from "node:test";

import { status } from "@grpc/grpc-js";

import { AcquireTicketRequest, Ticket } from "../gen/dragoman/v1/admission_service.js";
import { Channels } from "../src/channels.js";
import { Client } from "../src/client.js";
import { Controllers } from "../src/controllers.js";
import { isServiceError, TransportError } from "../src/errors.js";
import { Scope, within } from "../src/scope.js";
import { ControllerAdmission } from "../src/ticket.js";
import { failed, hasReason, SilentServer } from "./helpers.js";

const NOWHERE = { agent: "127.0.0.1:1" };

test("bad arguments are named before anything is sent", async () => {
  await using server = await SilentServer.start();
  await using client = new Client({ agent: server.address });
  const table: [string, () => unknown][] = [
    ["prompt", () => client.complete("")],
    ["deadlineSeconds", () => client.complete("x", { deadlineSeconds: -1 })],
    ["temprature", () => client.complete("x", { temprature: 1 } as never)],
    ["inputs", () => client.embed([])],
    ["inputs[1]", () => client.embed(["a", ""])],
    ["dimensions", () => client.embed("a", { dimensions: 0 })],
    ["text", () => client.tokenize("\ud800")],
    ["controller", () => client.agents()],
    ["controller", () => client.quote("x")],
  ];
  for (const [param, call] of table) {
    await assert.rejects(Promise.resolve().then(call), hasReason("invalid_request", param), param);
  }
  assert.throws(() => client.generate("x", { topK: -1 }), hasReason("invalid_request", "topK"), "at the call itself");
  assert.equal(server.numConnections, 0);
});

test("a configuration that makes no sense is refused", () => {
  const table: [string, object][] = [
    ["agent", { agent: "a:1", controller: "b:2" }],
    ["agent", { agent: " " }],
    ["controller", { controller: " , " }],
    ["adress", { adress: "a:1" }],
    ["retry.maxAttempts", { retry: { maxAttempts: 0 } }],
  ];
  for (const [param, config] of table) {
    assert.throws(() => new Client(config), hasReason("invalid_request", param), param);
  }
});

test("a stream has one reader", async () => {
  await using server = await SilentServer.start();
  await using client = new Client({ agent: server.address });
  const stream = client.generate("x", { model: "m" });
  const reading = stream.result();
  await assert.rejects(stream.result(), hasReason("invalid_request", "stream"));
  await server.met();
  stream.close();
  await assert.rejects(reading, hasReason("cancelled"));
});

test("a stream that is closed, and a client that is closed, end what waits", async () => {
  await using server = await SilentServer.start();
  const client = new Client({ controller: server.address });
  const waiting = [client.complete("x", { model: "m" }), client.models(), client.tokenize("x")];
  const ends = Promise.allSettled(waiting);
  await server.met();
  await client.close();
  for (const end of await ends) {
    assert.ok(end.status === "rejected" && hasReason("cancelled")(end.reason));
  }
  await assert.rejects(client.complete("x", { model: "m" }), hasReason("cancelled"), "nor does it start again");
});

test("a signal ends a call before it is sent, and while it waits", async () => {
  await using server = await SilentServer.start();
  await using client = new Client({ agent: server.address });
  const reason = new Error("enough");
  const before = AbortSignal.abort(reason);
  const hasCause = (error: unknown): boolean => hasReason("cancelled")(error) && (error as Error).cause === reason;
  await assert.rejects(client.complete("x", { model: "m", signal: before }), hasCause);
  assert.equal(server.numConnections, 0);
  const during = new AbortController();
  const waiting = client.complete("x", { model: "m", signal: during.signal });
  await server.met();
  during.abort(reason);
  await assert.rejects(waiting, hasCause);
});

test("a deadline ends a call to a server that stays silent", async () => {
  await using server = await SilentServer.start();
  await using client = new Client({ controller: server.address });
  await assert.rejects(client.models({ deadlineSeconds: 0.1 }), hasReason("deadline_exceeded"));
  await assert.rejects(client.complete("x", { model: "m", deadlineSeconds: 0.1 }), hasReason("deadline_exceeded"));
});

test("a server that takes the connection and says nothing is given up, and dialled anew", async () => {
  await using server = await SilentServer.start();
  const channels = new Channels(undefined, 0.1);
  for (const numConnections of [1, 2]) {
    const scope = new Scope(new Set(), undefined, undefined);
    const connecting = within(scope, () => channels.connect({ target: server.address, agentId: "" }, scope));
    await assert.rejects(connecting, (error) => isServiceError(error) && error.code === status.UNAVAILABLE);
    assert.equal(server.numConnections, numConnections);
  }
  channels.close();
});

test("a ticket that is slow on its way back holds nobody up who gives up", { timeout: 3000 }, async () => {
  await using server = await SilentServer.start();
  const live = new Set<Scope>();
  const channels = new Channels(undefined);
  const admission = new ControllerAdmission(channels, new Controllers(server.address), live);
  admission.release(Ticket.fromPartial({}));
  await server.met();
  const late = new Scope(live, undefined, 0.05);
  await assert.rejects(admission.acquire(AcquireTicketRequest.fromPartial({}), late), hasReason("deadline_exceeded"));
  const left = new Scope(live, undefined, undefined);
  const waiting = admission.acquire(AcquireTicketRequest.fromPartial({}), left);
  left.abort(failed("cancelled"));
  await assert.rejects(waiting, hasReason("cancelled"));
  await admission.close();
  channels.close();
});

test("nobody at the address is an error that names it", async () => {
  await using client = new Client({ ...NOWHERE, retry: { maxAttempts: 1 } });
  await assert.rejects(
    client.complete("x", { model: "m" }),
    /agent at 127\.0\.0\.1:1 cannot be reached: connection refused/,
  );
  await assert.rejects(client.models(), hasReason("no_agent"));
});

test("a controller that is away is passed over, one that answers is not", async () => {
  const controllers = new Controllers("a:1, b:2,a:1");
  const asked: string[] = [];
  const answer = await controllers.ask((address) => {
    asked.push(address);
    return address === "a:1" ? Promise.reject(new TransportError("no_agent", "away", true)) : Promise.resolve("yes");
  });
  assert.deepEqual([answer, asked, controllers.current], ["yes", ["a:1", "b:2"], "b:2"]);
  await assert.rejects(
    controllers.ask(() => Promise.reject(failed("queue_full"))),
    hasReason("queue_full"),
  );
  assert.equal(controllers.current, "b:2");
});
