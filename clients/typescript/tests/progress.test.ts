import assert from "node:assert/strict";
import { test } from "node:test";

import { FinishReason, type GenerationDelta } from "../gen/dragoman/v1/generation_service.js";
import { CursorGapError, Progress } from "../src/progress.js";

function delta(choiceIndex: number, cursor: number, ...tokenIds: number[]): GenerationDelta {
  return { choiceIndex, cursor: BigInt(cursor), tokenIds, text: "x", logprobs: [], finish: undefined };
}

function ending(last: GenerationDelta): GenerationDelta {
  return { ...last, finish: { reason: FinishReason.LENGTH, stop: { $case: "stopString", value: "." } } };
}

test("a delta is taken, dropped or refused by its cursor", () => {
  const progress = new Progress(2);
  const table: [string, GenerationDelta, "taken" | "dropped" | "refused"][] = [
    ["the first", delta(0, 0, 1, 2), "taken"],
    ["of another choice", delta(1, 0, 9), "taken"],
    ["doubled, whole", delta(0, 0, 1, 2), "dropped"],
    ["doubled, a part of it", delta(0, 1, 2), "dropped"],
    ["partly new", delta(0, 1, 2, 3), "refused"],
    ["a gap", delta(0, 3, 4), "refused"],
    ["a choice that was not asked for", delta(2, 0, 1), "refused"],
    ["text without a token", delta(0, 2), "taken"],
    ["the last", ending(delta(0, 2, 3)), "taken"],
    ["after the end", delta(0, 3, 4), "refused"],
    ["doubled after the end", ending(delta(0, 2, 3)), "dropped"],
    ["the end of the other, alone", ending(delta(1, 1)), "taken"],
  ];
  for (const [why, given, expected] of table) {
    let outcome: string;
    try {
      outcome = progress.take(given) === undefined ? "dropped" : "taken";
    } catch (error) {
      assert.ok(error instanceof CursorGapError, why);
      outcome = "refused";
    }
    assert.equal(outcome, expected, why);
  }
  assert.ok(progress.complete);
  assert.equal(progress.numTokens, 4);
  assert.deepEqual(progress.results()[0], {
    text: "xxx",
    tokenIds: [1, 2, 3],
    finishReason: "length",
    stopString: ".",
    stopTokenId: undefined,
    logprobs: [],
  });
});

test("an item of the stream says where it stands and when its choice ends", () => {
  const progress = new Progress(1);
  progress.take(delta(0, 0, 7));
  const token = progress.take(ending(delta(0, 1, 8, 9)));
  assert.deepEqual(token, { text: "x", tokenIds: [8, 9], cursor: 1, choice: 0, logprobs: [], finishReason: "length" });
});

test("the state of a resume holds the tokens of each choice and its end", () => {
  const progress = new Progress(2);
  progress.take(delta(0, 0, 1));
  progress.take(ending(delta(1, 0, 5, 6)));
  assert.ok(!progress.complete);
  const state = progress.resumeState(2, 77n, 2n ** 63n);
  assert.deepEqual([state.attempt, state.originEpoch, state.seed], [2, 77n, 2n ** 63n]);
  assert.deepEqual(
    state.choices.map(({ choiceIndex, tokenIds, finish }) => [choiceIndex, tokenIds?.ids, finish?.reason]),
    [
      [0, [1], undefined],
      [1, [5, 6], FinishReason.LENGTH],
    ],
  );
});
