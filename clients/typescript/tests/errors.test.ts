import assert from "node:assert/strict";
import { test } from "node:test";

import { Metadata, type ServiceError, status } from "@grpc/grpc-js";

import { ErrorDetail, ErrorReason } from "../gen/dragoman/v1/error.js";
import { catalogue, type ReasonName } from "../src/catalogue.js";
import { detailIn, DragomanError, fromDetail, fromStatus, plainDetails, reasonOf } from "../src/errors.js";

function serviceError(code: status, details: string): ServiceError {
  return Object.assign(new Error(details), { code, details, metadata: new Metadata() });
}

test("the catalogue has the reasons of the protocol, by name and number", () => {
  const held = Object.fromEntries(Object.entries(catalogue).map(([name, { number }]) => [name.toUpperCase(), number]));
  const named = Object.entries(ErrorReason).filter(([, number]) => typeof number === "number");
  assert.deepEqual(held, Object.fromEntries(named));
});

test("an error has the traits of its reason", () => {
  for (const name of Object.keys(catalogue) as ReasonName[]) {
    const error = new DragomanError(name, "it went wrong");
    const { retryable, grpcCode, httpStatus, remedy } = catalogue[name];
    const seen = [error.retryable, error.grpcCode, error.httpStatus, error.remedy];
    assert.deepEqual(seen, [retryable, grpcCode, httpStatus, remedy], name);
    assert.equal(reasonOf(catalogue[name].number), name);
  }
});

test("a reason of a newer version is named by its number and counts as internal", () => {
  const detail = ErrorDetail.decode(Buffer.from([8, 99]));
  const error = fromDetail(detail);
  assert.deepEqual([error.reason, error.retryable, error.httpStatus], ["unknown_99", false, 500]);
});

test("the server's own word comes from the trailing metadata, whole", () => {
  const trailer = new Metadata();
  assert.equal(detailIn(trailer), undefined);
  const detail = ErrorDetail.fromPartial({
    reason: ErrorReason.QUEUE_FULL,
    message: "full",
    retryDelay: { seconds: 1n, nanos: 500_000_000 },
    metadata: { limit: "7" },
  });
  trailer.set("dragoman-error-bin", Buffer.from(ErrorDetail.encode(detail).finish()));
  const error = detailIn(trailer);
  assert.deepEqual([error?.reason, error?.message, error?.retryDelaySeconds], ["queue_full", "full", 1.5]);
  assert.deepEqual(error?.metadata, { limit: "7" });
  trailer.set("dragoman-error-bin", Buffer.from([0xff]));
  assert.equal(detailIn(trailer)?.reason, "internal", "bytes that are no detail");
});

test("a status without a detail has the nearest reason", () => {
  assert.equal(fromStatus(serviceError(status.PERMISSION_DENIED, "go away")).reason, "permission_denied");
  const unlike = fromStatus(serviceError(status.DATA_LOSS, ""));
  assert.deepEqual([unlike.reason, unlike.message], ["internal", "DATA_LOSS"]);
});

test("a connection that nobody accepts is told from others", () => {
  const refused = serviceError(
    status.UNAVAILABLE,
    "No connection established. Last error: connect ECONNREFUSED 127.0.0.1:1",
  );
  assert.deepEqual(plainDetails(refused), { text: "connection refused", refused: true });
  assert.deepEqual(plainDetails(serviceError(status.UNAVAILABLE, "reset")), { text: "reset", refused: false });
});
