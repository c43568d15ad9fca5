import assert from "node:assert/strict";
import { test } from "node:test";

import { AcquireTicketRequest, Priority } from "../gen/dragoman/v1/admission_service.js";
import { GenerateRequest } from "../gen/dragoman/v1/generation_service.js";
import { durationOf, secondsOf } from "../src/durations.js";
import {
  checkOptions,
  checkPrompt,
  type Form,
  GENERATE_OPTIONS,
  type GenerateOptions,
  prepare,
} from "../src/request.js";
import { hasReason } from "./helpers.js";

test("what the controller is told: sizes and a digest", () => {
  const { acquire, generate } = prepare(
    [1, 258, 70000],
    { maxOutputTokens: 7, priority: "batch", numChoices: 2 },
    "m",
    "t",
  );
  assert.deepEqual(
    [acquire.promptTokens, acquire.promptBytes, acquire.maxOutputTokens, acquire.numChoices],
    [3, 12n, 7, 2],
  );
  assert.deepEqual([acquire.model, acquire.tenant, acquire.priority], ["m", "t", Priority.BATCH]);
  assert.equal(acquire.requestId, generate.requestId);
  assert.match(generate.requestId, /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
  const text = prepare("hi ü", {}, "m", "").acquire;
  assert.deepEqual([text.promptTokens, text.promptBytes, text.priority], [undefined, 5n, Priority.STANDARD]);
});

test("every option arrives in the message, and what is left out is not set", () => {
  const options: GenerateOptions = {
    requestId: "mine",
    cacheSalt: "salt",
    maxOutputTokens: 1,
    minOutputTokens: 2,
    stop: "end",
    stopTokenIds: [3],
    includeStopString: true,
    ignoreEos: true,
    temperature: 0,
    topP: 0.5,
    topK: 4,
    minP: 0.25,
    seed: 2n ** 64n - 1n,
    repetitionPenalty: 1.5,
    frequencyPenalty: -0.5,
    presencePenalty: 0.75,
    logitBias: { 5: -100 },
    allowedTokenIds: [6],
    badWords: ["bad"],
    numChoices: 7,
    logprobs: 0,
    promptLogprobs: 8,
    addSpecialTokens: false,
    parseSpecialTokens: false,
    skipSpecialTokens: false,
  };
  checkOptions(options, GENERATE_OPTIONS);
  const sent = GenerateRequest.decode(GenerateRequest.encode(prepare("x", options, "m", "").generate).finish());
  const { sampling, stop, textOptions } = sent;
  assert.equal(sent.cacheSalt, "salt");
  assert.equal(sampling?.seed, 2n ** 64n - 1n);
  assert.deepEqual(
    [sampling.temperature, sampling.topP, sampling.topK, sampling.minP, sampling.numChoices],
    [0, 0.5, 4, 0.25, 7],
  );
  assert.deepEqual(
    [sampling.repetitionPenalty, sampling.frequencyPenalty, sampling.presencePenalty, sampling.logitBias],
    [1.5, -0.5, 0.75, { 5: -100 }],
  );
  assert.deepEqual([sampling.allowedTokenIds, sampling.badWords], [[6], ["bad"]]);
  assert.deepEqual([sampling.numLogprobs, sampling.numPromptLogprobs], [0, 8]);
  assert.deepEqual(stop, {
    maxOutputTokens: 1,
    strings: ["end"],
    ignoreEos: true,
    tokenIds: [3],
    minOutputTokens: 2,
    includeStopString: true,
  });
  assert.deepEqual(textOptions, { addSpecialTokens: false, parseSpecialTokens: false, skipSpecialTokens: false });
  const bare = prepare("x", {}, "m", "").generate;
  assert.deepEqual(
    [bare.sampling?.temperature, bare.sampling?.numLogprobs, bare.stop?.maxOutputTokens],
    [undefined, undefined, undefined],
  );
});

test("each form of the output", () => {
  const kinds: [Form, string, unknown][] = [
    [{ jsonSchema: { type: "object" } }, "jsonSchema", '{"type":"object"}'],
    [{ jsonSchema: "{}" }, "jsonSchema", "{}"],
    [{ jsonObject: true }, "jsonObject", true],
    [{ regex: "a+" }, "regex", "a+"],
    [{ choices: ["a", "b"] }, "choices", { texts: ["a", "b"] }],
    [{ lark: "start: x" }, "lark", "start: x"],
  ];
  for (const [form, kind, value] of kinds) {
    checkOptions({ form }, ["form"]);
    const grammar = prepare("x", { form }, "m", "").generate.sampling?.grammar;
    assert.deepEqual(grammar?.kind, { $case: kind, value });
  }
});

test("a bad option is named", () => {
  const bad: [string, unknown][] = [
    ["deadlineSeconds", -1],
    ["deadlineSeconds", Infinity],
    ["maxQueueWaitSeconds", 0],
    ["maxOutputTokens", 1.5],
    ["maxOutputTokens", -1],
    ["numChoices", 0],
    ["temperature", "hot"],
    ["seed", -1],
    ["seed", 2 ** 53],
    ["seed", 2n ** 64n],
    ["stop", ""],
    ["stop", ["a", ""]],
    ["stopTokenIds", [2 ** 32]],
    ["logitBias", { a: 1 }],
    ["priority", "urgent"],
    ["model", "\ud800"],
    ["signal", {}],
    ["form", {}],
    ["form", { regex: "a", lark: "b" }],
    ["form", { jsonObject: false }],
    ["topp", 1],
  ];
  for (const [name, value] of bad) {
    assert.throws(
      () => {
        checkOptions({ [name]: value }, GENERATE_OPTIONS);
      },
      hasReason("invalid_request", name),
      name,
    );
  }
  assert.throws(
    () => {
      checkOptions({ form: { regex: 5 } }, ["form"]);
    },
    hasReason("invalid_request", "form.regex"),
  );
  checkOptions({ model: undefined, seed: undefined }, GENERATE_OPTIONS);
});

test("a bad prompt is named by its place", () => {
  const bad: [string, unknown][] = [
    ["prompt", ""],
    ["prompt", []],
    ["prompt", 7],
    ["prompt", "\udfff"],
    ["prompt", [1, -1]],
    ["prompt", [1, "a"]],
    ["messages[0].name", [{ role: "user", content: "x", name: "y" }]],
    ["messages[1]", [{ role: "user", content: "x" }, null]],
    ["messages[0].content", [{ role: "user" }]],
    ["messages[0].role", [{ role: "\ud800", content: "x" }]],
  ];
  for (const [param, prompt] of bad) {
    assert.throws(
      () => {
        checkPrompt(prompt as never);
      },
      hasReason("invalid_request", param),
      JSON.stringify(prompt),
    );
  }
});

test("durations keep their nanoseconds", () => {
  for (const seconds of [0, 0.25, 1.5, 600, 0.000000001]) {
    assert.equal(secondsOf(durationOf(seconds)), seconds);
  }
  assert.deepEqual(durationOf(-1), { seconds: 0n, nanos: 0 });
  assert.deepEqual(durationOf(1.9999999999), { seconds: 1n, nanos: 999_999_999 });
});

test("the wait in the queue is told", () => {
  const { acquire } = prepare("x", { maxQueueWaitSeconds: 1.5 }, "m", "");
  const sent = AcquireTicketRequest.decode(AcquireTicketRequest.encode(acquire).finish());
  assert.equal(secondsOf(sent.maxQueueWait), 1.5);
  assert.equal(prepare("x", {}, "m", "").acquire.maxQueueWait, undefined);
});
