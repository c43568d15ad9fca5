import assert from "node:assert/strict";
import { test } from "node:test";

import { type Reason, TransportError } from "../src/errors.js";
import {
  type Circumstances,
  DEFAULT_RETRY_POLICY,
  delayAfter,
  Pursuit,
  RetryBudget,
  retryPolicyOf,
  type Step,
  stepAfter,
} from "../src/retry.js";
import { failed, hasReason } from "./helpers.js";

test("what a reason asks for, refused and cut", () => {
  const table: [Reason, Step, Step][] = [
    ["agent_lost", "resume", "resume"],
    ["device_fault", "resume", "resume"],
    ["agent_draining", "ask again", "resume"],
    ["credit_timeout", "ask again", "resume"],
    ["queue_full", "ask again", "give up"],
    ["ticket_expired", "ask again", "give up"],
    ["internal", "give up", "give up"],
    ["cancelled", "give up", "give up"],
    ["prompt_quarantined", "give up", "give up"],
    ["unknown_99", "give up", "give up"],
  ];
  for (const [reason, refused, cut] of table) {
    assert.equal(stepAfter(failed(reason), false, false), refused, `${reason} refused`);
    assert.equal(stepAfter(failed(reason), true, false), cut, `${reason} cut`);
  }
});

test("a resume may meet its old self under way, a new request may not", () => {
  assert.equal(stepAfter(failed("duplicate_request"), false, false), "give up");
  assert.equal(stepAfter(failed("duplicate_request"), false, true), "ask again");
});

test("delays double within their jitter and heed the server", () => {
  const policy = retryPolicyOf({ baseSeconds: 0.1, maxDelaySeconds: 1 });
  for (const [failures, longest] of [
    [1, 0.1],
    [2, 0.2],
    [4, 0.8],
    [5, 1],
    [60, 1],
  ] as const) {
    assert.equal(delayAfter(policy, failures, failed("queue_full"), 0), longest / 2);
    const most = delayAfter(policy, failures, failed("queue_full"), 0.999);
    assert.ok(most > longest * 0.9 && most <= longest, `failure ${String(failures)}: ${String(most)}`);
  }
  assert.equal(delayAfter(policy, 1, failed("queue_full", { retryDelaySeconds: 3 }), 0.5), 3);
});

test("ten successes give one retry back, and not more than there was", () => {
  const budget = new RetryBudget(2);
  assert.deepEqual([budget.spend(), budget.spend(), budget.spend()], [true, true, false]);
  for (let success = 0; success < 10; success += 1) {
    budget.succeeded();
  }
  assert.deepEqual([budget.spend(), budget.spend()], [true, false]);
  for (let success = 0; success < 100; success += 1) {
    budget.succeeded();
  }
  assert.deepEqual([budget.spend(), budget.spend(), budget.spend()], [true, true, false]);
});

const REFUSED: Circumstances = { accepted: false, hasOrigin: false, now: 1000, deadline: undefined, chance: 0.5 };
const CUT: Circumstances = { ...REFUSED, accepted: true, hasOrigin: true };

test("a request of which nothing came is asked for four times in all", () => {
  const pursuit = new Pursuit(DEFAULT_RETRY_POLICY);
  const steps = [1, 2, 3, 4].map(() => pursuit.failed(failed("queue_full"), REFUSED).step);
  assert.deepEqual(steps, ["ask again", "ask again", "ask again", "give up"]);
});

test("a lost agent of a request that was never placed is answered by asking again", () => {
  assert.equal(new Pursuit(DEFAULT_RETRY_POLICY).failed(failed("agent_lost"), REFUSED).step, "ask again");
});

function cutPursuit(): Pursuit {
  const pursuit = new Pursuit(DEFAULT_RETRY_POLICY);
  pursuit.started();
  assert.deepEqual(pursuit.failed(failed("agent_lost"), CUT), { step: "resume", delaySeconds: 0 }, "at once");
  return pursuit;
}

test("a cut stream is pursued for its patience, and not longer", () => {
  const again = { ...REFUSED, hasOrigin: true };
  assert.equal(cutPursuit().failed(failed("no_agent"), { ...again, now: 1020 }).step, "ask again");
  assert.equal(cutPursuit().failed(failed("no_agent"), { ...again, now: 1031 }).step, "give up");
});

test("while every connection is refused only for five seconds", () => {
  const refused = new TransportError("no_agent", "connection refused", true);
  const pursuit = cutPursuit();
  assert.equal(pursuit.failed(refused, { ...REFUSED, now: 1001 }).step, "ask again");
  assert.equal(pursuit.failed(refused, { ...REFUSED, now: 1005 }).step, "ask again");
  assert.equal(pursuit.failed(refused, { ...REFUSED, now: 1007 }).step, "give up");
  const answered = cutPursuit();
  answered.failed(refused, { ...REFUSED, now: 1001 });
  answered.failed(failed("no_agent"), { ...REFUSED, now: 1004 });
  assert.equal(answered.failed(refused, { ...REFUSED, now: 1008 }).step, "ask again", "somebody answered in between");
});

test("a stream that goes on has all its patience again, and three resumes in all", () => {
  const pursuit = cutPursuit();
  for (const now of [1060, 1120]) {
    pursuit.flowed();
    assert.equal(pursuit.cut, undefined);
    assert.deepEqual(pursuit.failed(failed("agent_lost"), { ...CUT, now }), { step: "resume", delaySeconds: 0 });
  }
  pursuit.flowed();
  assert.equal(pursuit.failed(failed("agent_lost"), { ...CUT, now: 1180 }).step, "give up");
  assert.equal(pursuit.numResumes, 3);
});

test("no retry that would come after the deadline", () => {
  const slow = failed("queue_full", { retryDelaySeconds: 3 });
  assert.equal(new Pursuit(DEFAULT_RETRY_POLICY).failed(slow, { ...REFUSED, deadline: 1002 }).step, "give up");
  assert.equal(new Pursuit(DEFAULT_RETRY_POLICY).failed(slow, { ...REFUSED, deadline: 1004 }).step, "ask again");
});

test("a policy that makes no sense is refused by the name of its field", () => {
  assert.throws(() => retryPolicyOf({ maxAttempts: 0 }), hasReason("invalid_request", "retry.maxAttempts"));
  assert.throws(() => retryPolicyOf({ baseSeconds: -1 }), hasReason("invalid_request", "retry.baseSeconds"));
  assert.throws(() => retryPolicyOf({ budget: NaN }), hasReason("invalid_request", "retry.budget"));
  assert.throws(() => retryPolicyOf({ attempts: 3 } as never), hasReason("invalid_request", "retry.attempts"));
});
