/** The calls of the runner protocol, but for `generate`. */

import type { Client, Estimate, GenerateOptions, Priority, Prompt } from "../src/index.js";
import { secondsOf } from "../src/durations.js";
import { emit } from "./emit.js";
import { type Actions, generate } from "./generate.js";

export interface Call {
  readonly do: string;
  readonly prompt?: {
    readonly text?: string;
    readonly token_ids?: number[];
    readonly messages?: { role: string; content: string }[];
    readonly repeat?: string;
    readonly times?: number;
  };
  readonly options?: Options;
  readonly actions?: Actions;
  readonly inputs?: (string | number[])[];
  readonly text?: string;
  readonly token_ids?: number[];
  readonly request_id?: string;
  readonly agent_id?: string;
  readonly streams?: number;
}

interface Options {
  readonly model?: string;
  readonly request_id?: string;
  readonly max_output_tokens?: number;
  readonly min_output_tokens?: number;
  readonly temperature?: number;
  readonly top_p?: number;
  readonly top_k?: number;
  readonly min_p?: number;
  readonly seed?: number;
  readonly n?: number;
  readonly stop?: string[];
  readonly stop_token_ids?: number[];
  readonly ignore_eos?: boolean;
  readonly logprobs?: number;
  readonly prompt_logprobs?: number;
  readonly add_special_tokens?: boolean;
  readonly parse_special_tokens?: boolean;
  readonly skip_special_tokens?: boolean;
  readonly deadline?: number;
  readonly max_queue_wait?: number;
  readonly priority?: Priority;
  readonly dimensions?: number;
}

function promptOf({ prompt }: Call): Prompt {
  return prompt?.text ?? prompt?.token_ids ?? prompt?.messages ?? (prompt?.repeat ?? "").repeat(prompt?.times ?? 0);
}

function optionsOf({ options = {} }: Call): GenerateOptions {
  return {
    model: options.model,
    requestId: options.request_id,
    maxOutputTokens: options.max_output_tokens,
    minOutputTokens: options.min_output_tokens,
    temperature: options.temperature,
    topP: options.top_p,
    topK: options.top_k,
    minP: options.min_p,
    seed: options.seed,
    numChoices: options.n,
    stop: options.stop,
    stopTokenIds: options.stop_token_ids,
    ignoreEos: options.ignore_eos,
    logprobs: options.logprobs,
    promptLogprobs: options.prompt_logprobs,
    addSpecialTokens: options.add_special_tokens,
    deadlineSeconds: options.deadline,
    maxQueueWaitSeconds: options.max_queue_wait,
    priority: options.priority,
  };
}

/** One call; its errors are for the caller to report. */
export async function play(client: Client, index: number, call: Call): Promise<void> {
  if (call.do === "generate") {
    const begin = (signal: AbortSignal): ReturnType<Client["generate"]> =>
      client.generate(promptOf(call), { ...optionsOf(call), signal });
    await generate(begin, index, call.actions ?? {});
    return;
  }
  const value = VALUES[call.do];
  if (value === undefined) {
    emit({ event: "unsupported", call: index, what: call.do });
    return;
  }
  emit({ event: "value", call: index, value: (await value(client, call)) ?? null });
}

const VALUES: Readonly<Record<string, (client: Client, call: Call) => Promise<unknown>>> = {
  load_streams: loadStreams,
  quote,
  agents,
  load,
  models: (client) => client.models(),
  cancel: (client, call) => client.cancel(call.request_id ?? ""),
  async embed(client, { inputs = [], options = {} }) {
    const answer = await client.embed(inputs, { model: options.model, dimensions: options.dimensions });
    return { vectors: answer.vectors, prompt_tokens: answer.promptTokens };
  },
  tokenize: (client, { text = "", options = {} }) =>
    client.tokenize(text, {
      model: options.model,
      addSpecialTokens: options.add_special_tokens,
      parseSpecialTokens: options.parse_special_tokens,
    }),
  detokenize: (client, { token_ids = [], options = {} }) =>
    client.detokenize(token_ids, { model: options.model, skipSpecialTokens: options.skip_special_tokens }),
  async hardware(client, call) {
    const answer = await client.hardware(call.agent_id);
    return { kind: answer.profile?.device?.kind, chosen: answer.candidates.map(({ chosen }) => chosen) };
  },
};

async function quote(client: Client, call: Call): Promise<unknown> {
  const answer = await client.quote(promptOf(call), optionsOf(call));
  const seconds = (one: Estimate): number[] => [one.p10Seconds, one.expectedSeconds, one.p90Seconds];
  return {
    agent_id: answer.agentId,
    time_to_first_token: seconds(answer.timeToFirstToken),
    time_per_output_token: seconds(answer.timePerOutputToken),
    finish: seconds(answer.finish),
  };
}

async function agents(client: Client): Promise<unknown> {
  return (await client.agents()).map(({ agent, state, heartbeatAge }) => ({
    agent_id: agent?.agentId,
    state,
    models: agent?.models.map(({ model }) => model),
    heartbeat_age_seconds: secondsOf(heartbeatAge),
  }));
}

async function load(client: Client): Promise<unknown> {
  return (await client.load()).map(({ agentId, load: now }) => ({
    agent_id: agentId,
    running_requests: now?.runningRequests,
    waiting_requests: now?.waitingRequests,
    free_kv_blocks: now?.freeKvBlocks,
  }));
}

/** Opens many streams at once and counts the CPU seconds of this process for them. */
async function loadStreams(client: Client, call: Call): Promise<unknown> {
  let tokens = 0;
  let items = 0;
  const one = async (): Promise<void> => {
    for await (const token of client.generate(promptOf(call), optionsOf(call))) {
      tokens += token.tokenIds.length;
      items += 1;
    }
  };
  const began = performance.now();
  const before = process.cpuUsage();
  await Promise.all(Array.from({ length: call.streams ?? 0 }, one));
  const { user, system } = process.cpuUsage(before);
  return { tokens, items, cpu_seconds: (user + system) / 1e6, wall_seconds: (performance.now() - began) / 1000 };
}
