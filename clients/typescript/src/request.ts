/** Turns the arguments of a call into the messages of the protocol, and says clearly what is wrong with them. */

import { randomUUID } from "node:crypto";

import { AcquireTicketRequest, Priority as WirePriority } from "../gen/dragoman/v1/admission_service.js";
import { type Grammar, GenerateRequest } from "../gen/dragoman/v1/generation_service.js";
import type { ChatMessage } from "../gen/dragoman/v1/tokenizer_service.js";
import { durationOf } from "./durations.js";
import { invalid } from "./errors.js";
import { digestOfText, digestOfTokens } from "./ticket.js";

/** One turn of a conversation. `role` is such as "system", "user" or "assistant". */
export interface Message {
  readonly role: string;
  readonly content: string;
}

/** A text, token ids, or a conversation, which the model's own chat template renders. */
export type Prompt = string | readonly number[] | readonly Message[];

/** Class of service. */
export type Priority = "interactive" | "standard" | "batch";

/** The form that the output must have. A schema is the document or its text; `lark` is a Lark grammar. */
export type Form =
  | { readonly jsonSchema: string | object }
  | { readonly jsonObject: true }
  | { readonly regex: string }
  | { readonly choices: readonly string[] }
  | { readonly lark: string };

/** What bounds any call. */
export interface CallOptions {
  /** Bounds everything, the wait in the queue included. */
  readonly deadlineSeconds?: number | undefined;
  /** Ends the call when it is aborted. */
  readonly signal?: AbortSignal | undefined;
}

/**
 * Options of a generation. One that is left out means the model's own default. Ranges are those of SamplingParameters and
 * StopCriteria in generation_service.proto.
 */
export interface GenerateOptions extends CallOptions {
  /** May be left out where one model is served. */
  readonly model?: string | undefined;
  /** Names the request for `cancel`; left out draws one. */
  readonly requestId?: string | undefined;
  /** The longest wait in the controller's queue; left out leaves it to the policy. */
  readonly maxQueueWaitSeconds?: number | undefined;
  readonly priority?: Priority | undefined;
  /** Separates prefix caches that must not be shared. */
  readonly cacheSalt?: string | undefined;
  readonly maxOutputTokens?: number | undefined;
  readonly minOutputTokens?: number | undefined;
  /** One stop string or several. */
  readonly stop?: string | readonly string[] | undefined;
  readonly stopTokenIds?: readonly number[] | undefined;
  readonly includeStopString?: boolean | undefined;
  readonly ignoreEos?: boolean | undefined;
  readonly temperature?: number | undefined;
  readonly topP?: number | undefined;
  readonly topK?: number | undefined;
  readonly minP?: number | undefined;
  /** A number above 2^53 must be a bigint. */
  readonly seed?: number | bigint | undefined;
  readonly repetitionPenalty?: number | undefined;
  readonly frequencyPenalty?: number | undefined;
  readonly presencePenalty?: number | undefined;
  /** Added to the logit of each token id. */
  readonly logitBias?: Readonly<Record<number, number>> | undefined;
  readonly allowedTokenIds?: readonly number[] | undefined;
  readonly badWords?: readonly string[] | undefined;
  readonly form?: Form | undefined;
  /** How many outputs to generate. */
  readonly numChoices?: number | undefined;
  /** How many alternatives to report with each token; left out reports no log-probabilities. */
  readonly logprobs?: number | undefined;
  readonly promptLogprobs?: number | undefined;
  readonly addSpecialTokens?: boolean | undefined;
  readonly parseSpecialTokens?: boolean | undefined;
  readonly skipSpecialTokens?: boolean | undefined;
}

/** A request that is ready to be admitted and sent. */
export interface Prepared {
  readonly generate: GenerateRequest;
  readonly acquire: AcquireTicketRequest;
}

const MAX_UINT32 = 2 ** 32 - 1;
const MAX_SECONDS = 1e9;

type Check = (param: string, value: unknown) => unknown;

function oneOf(kind: string, holds: (value: unknown) => boolean): Check {
  return (param, value) => {
    if (!holds(value)) {
      throw invalid(param, `must be ${kind}, not ${shown(value)}`);
    }
  };
}

const isText = (value: unknown): value is string => typeof value === "string" && value.isWellFormed();
const isUint32 = (value: unknown): boolean =>
  Number.isInteger(value) && Number(value) >= 0 && Number(value) <= MAX_UINT32;
const isSeed = (value: unknown): boolean =>
  typeof value === "bigint" ? BigInt.asUintN(64, value) === value : Number.isSafeInteger(value) && Number(value) >= 0;
const listOf = (holds: (value: unknown) => boolean) => (value: unknown) => Array.isArray(value) && value.every(holds);

const text = oneOf("a text of valid Unicode", isText);
const whole = oneOf("a whole number from 0 to 2^32 - 1", isUint32);
const number = oneOf("a finite number", Number.isFinite);
const flag = oneOf("true or false", (value) => typeof value === "boolean");
const tokens = oneOf("a list of token ids", listOf(isUint32));
const texts = oneOf("a list of texts of valid Unicode", listOf(isText));
const seconds = oneOf(
  "a number of seconds above 0",
  (value) => typeof value === "number" && value > 0 && value <= MAX_SECONDS,
);
const isStop = (value: unknown): boolean => isText(value) && value !== "";

const CHECKS: Record<keyof GenerateOptions, Check> = {
  model: text,
  requestId: text,
  deadlineSeconds: seconds,
  signal: oneOf("an AbortSignal", (value) => value instanceof AbortSignal),
  maxQueueWaitSeconds: seconds,
  priority: oneOf("interactive, standard or batch", (value) =>
    ["interactive", "standard", "batch"].includes(value as string),
  ),
  cacheSalt: text,
  maxOutputTokens: whole,
  minOutputTokens: whole,
  stop: oneOf("a text of at least one character, or a list of them", (value) => isStop(value) || listOf(isStop)(value)),
  stopTokenIds: tokens,
  includeStopString: flag,
  ignoreEos: flag,
  temperature: number,
  topP: number,
  topK: whole,
  minP: number,
  seed: oneOf("a whole number from 0 to 2^64 - 1, a bigint above 2^53", isSeed),
  repetitionPenalty: number,
  frequencyPenalty: number,
  presencePenalty: number,
  logitBias: oneOf("an object of token ids and numbers", isBias),
  allowedTokenIds: tokens,
  badWords: texts,
  form: (param, value) => grammarOf(param, value as Form),
  numChoices: oneOf(
    "a whole number from 1 to 128",
    (value) => isUint32(value) && Number(value) >= 1 && Number(value) <= 128,
  ),
  logprobs: whole,
  promptLogprobs: whole,
  addSpecialTokens: flag,
  parseSpecialTokens: flag,
  skipSpecialTokens: flag,
};

function isBias(value: unknown): boolean {
  return (
    typeof value === "object" &&
    value !== null &&
    Object.entries(value).every(([id, bias]) => isUint32(Number(id)) && Number.isFinite(bias))
  );
}

/** Throws invalid_request for an option that is unknown or of a wrong kind. */
export function checkOptions(options: object, known: readonly (keyof GenerateOptions)[]): void {
  for (const [name, value] of Object.entries(options) as [string, unknown][]) {
    if (!(known as readonly string[]).includes(name)) {
      throw invalid(name, `is no option of this call (known: ${known.join(", ")})`);
    }
    if (value !== undefined) {
      CHECKS[name as keyof GenerateOptions](name, value);
    }
  }
}

/** The names of all options of a generation. */
export const GENERATE_OPTIONS = Object.keys(CHECKS) as (keyof GenerateOptions)[];

/** Whether a prompt is a list of messages. */
export function isConversation(prompt: Prompt): prompt is readonly Message[] {
  return Array.isArray(prompt) && typeof prompt[0] === "object";
}

/** Throws invalid_request for a prompt that is of no known kind, or empty. */
export function checkPrompt(prompt: Prompt, param = "prompt"): void {
  if (typeof prompt === "string") {
    if (prompt === "") {
      throw invalid(param, "the text is empty; give at least one character");
    }
    text(param, prompt);
  } else if (!Array.isArray(prompt)) {
    throw invalid(param, `must be a text, a list of token ids or a list of messages, not ${shown(prompt)}`);
  } else if (prompt.length === 0) {
    throw invalid(param, "the list is empty; give at least one token id, or one message");
  } else if (isConversation(prompt)) {
    prompt.forEach((message, index) => {
      checkMessage(message, `messages[${String(index)}]`);
    });
  } else {
    tokens(param, prompt);
  }
}

function checkMessage(message: unknown, path: string): asserts message is ChatMessage {
  if (typeof message !== "object" || message === null) {
    throw invalid(path, `must be such as {role: "user", content: "..."}, not ${shown(message)}`);
  }
  const extra = Object.keys(message).find((key) => key !== "role" && key !== "content");
  if (extra !== undefined) {
    throw invalid(`${path}.${extra}`, "is not known; a message has role and content");
  }
  for (const key of ["role", "content"] as const) {
    text(`${path}.${key}`, (message as Partial<Message>)[key]);
  }
}

const PRIORITIES: Record<Priority, WirePriority> = {
  interactive: WirePriority.INTERACTIVE,
  standard: WirePriority.STANDARD,
  batch: WirePriority.BATCH,
};

/** The messages for a text or token ids that were checked; ticket, deadline and resume state are added later. */
export function prepare(
  prompt: string | readonly number[],
  options: GenerateOptions,
  model: string,
  tenant: string,
): Prepared {
  const generate = GenerateRequest.fromPartial({
    requestId: options.requestId ?? randomUUID(),
    model,
    cacheSalt: options.cacheSalt ?? "",
    sampling: samplingOf(options),
    stop: {
      maxOutputTokens: options.maxOutputTokens,
      minOutputTokens: options.minOutputTokens,
      strings: typeof options.stop === "string" ? [options.stop] : [...(options.stop ?? [])],
      tokenIds: [...(options.stopTokenIds ?? [])],
      includeStopString: options.includeStopString ?? false,
      ignoreEos: options.ignoreEos ?? false,
    },
    textOptions: {
      addSpecialTokens: options.addSpecialTokens,
      parseSpecialTokens: options.parseSpecialTokens,
      skipSpecialTokens: options.skipSpecialTokens,
    },
  });
  const acquire = AcquireTicketRequest.fromPartial({
    requestId: generate.requestId,
    model,
    tenant,
    maxOutputTokens: options.maxOutputTokens ?? 0,
    numChoices: options.numChoices ?? 0,
    priority: PRIORITIES[options.priority ?? "standard"],
    maxQueueWait: options.maxQueueWaitSeconds === undefined ? undefined : durationOf(options.maxQueueWaitSeconds),
  });
  // A prompt may be long: it is put in place here, not copied by fromPartial.
  if (typeof prompt === "string") {
    generate.prompt = { $case: "text", value: prompt };
    acquire.promptBytes = BigInt(Buffer.byteLength(prompt));
    acquire.promptDigest = digestOfText(prompt);
  } else {
    generate.prompt = { $case: "tokenIds", value: { ids: prompt as number[] } };
    acquire.promptTokens = prompt.length;
    acquire.promptBytes = BigInt(4 * prompt.length);
    acquire.promptDigest = digestOfTokens(prompt);
  }
  return { generate, acquire };
}

function samplingOf(
  options: GenerateOptions,
): NonNullable<Parameters<typeof GenerateRequest.fromPartial>[0]["sampling"]> {
  return {
    temperature: options.temperature,
    topP: options.topP,
    topK: options.topK,
    minP: options.minP,
    seed: options.seed === undefined ? undefined : BigInt(options.seed),
    repetitionPenalty: options.repetitionPenalty,
    frequencyPenalty: options.frequencyPenalty,
    presencePenalty: options.presencePenalty,
    logitBias: { ...options.logitBias },
    allowedTokenIds: [...(options.allowedTokenIds ?? [])],
    badWords: [...(options.badWords ?? [])],
    grammar: options.form && grammarOf("form", options.form),
    numChoices: options.numChoices,
    numLogprobs: options.logprobs,
    numPromptLogprobs: options.promptLogprobs,
  };
}

const FORMS = "{jsonSchema}, {jsonObject: true}, {regex}, {choices} or {lark}";

function grammarOf(param: string, form: Form): Grammar {
  const kinds = typeof form === "object" && (form as Form | null) !== null ? Object.keys(form) : [];
  const [kind] = kinds;
  if (kinds.length !== 1 || kind === undefined) {
    throw invalid(param, `must be one of ${FORMS}, not ${shown(form)}`);
  }
  const path = `${param}.${kind}`;
  if ("jsonSchema" in form) {
    const schema = typeof form.jsonSchema === "string" ? form.jsonSchema : JSON.stringify(form.jsonSchema);
    text(path, schema);
    return { kind: { $case: "jsonSchema", value: schema } };
  }
  if ("choices" in form) {
    texts(path, form.choices);
    return { kind: { $case: "choices", value: { texts: [...form.choices] } } };
  }
  if ("regex" in form) {
    text(path, form.regex);
    return { kind: { $case: "regex", value: form.regex } };
  }
  if ("lark" in form) {
    text(path, form.lark);
    return { kind: { $case: "lark", value: form.lark } };
  }
  if ((form as { jsonObject?: unknown }).jsonObject !== true) {
    throw invalid(param, `must be one of ${FORMS}, not ${shown(form)}`);
  }
  return { kind: { $case: "jsonObject", value: true } };
}

/** A value as it is shown in a message, shortened. */
function shown(value: unknown): string {
  let whole: string | undefined;
  try {
    whole = JSON.stringify(value);
  } catch {
    whole = undefined; // a bigint, or a circle
  }
  return (whole ?? String(value)).slice(0, 80);
}
