/** `generate` of the runner protocol: a stream, with the actions of the call, to its one end. */

import { setTimeout as sleep } from "node:timers/promises";

import { DragomanError, type GenerationResult, type GenerationStream, type Token } from "../src/index.js";
import { emit } from "./emit.js";

export interface Actions {
  readonly cancel_after_tokens?: number;
  readonly cancel_after_seconds?: number;
  readonly pause_after_tokens?: number;
  readonly pause_seconds?: number;
}

/** `begin` makes the stream, which the signal ends. */
export async function generate(
  begin: (signal: AbortSignal) => GenerationStream,
  index: number,
  actions: Actions,
): Promise<void> {
  const outside = new AbortController();
  const timer =
    actions.cancel_after_seconds === undefined
      ? undefined
      : setTimeout(() => {
          outside.abort();
        }, 1000 * actions.cancel_after_seconds);
  try {
    await using stream = begin(outside.signal);
    const result = await read(stream, index, actions);
    emit(result === undefined ? { event: "cancelled", call: index } : resultLine(result, index));
  } catch (error) {
    if (!outside.signal.aborted || !(error instanceof DragomanError) || error.cause !== outside.signal.reason) {
      throw error;
    }
    emit({ event: "cancelled", call: index });
  } finally {
    clearTimeout(timer);
  }
}

/** Emits each item; undefined when the stream was left as told. */
async function read(stream: GenerationStream, index: number, actions: Actions): Promise<GenerationResult | undefined> {
  const stopAfter = actions.cancel_after_tokens ?? Infinity;
  let pauseAfter = actions.pause_after_tokens ?? Infinity;
  let numTokens = 0;
  if (stopAfter === 0) {
    return undefined;
  }
  for await (const token of stream) {
    numTokens += token.tokenIds.length;
    emit(tokenLine(token, index));
    if (numTokens >= stopAfter) {
      return undefined; // leaving the loop is what cancels
    }
    if (numTokens >= pauseAfter) {
      pauseAfter = Infinity;
      await sleep(1000 * (actions.pause_seconds ?? 0));
    }
  }
  return stream.result();
}

function tokenLine(token: Token, index: number): Record<string, unknown> {
  return {
    event: "token",
    call: index,
    cursor: token.cursor,
    choice: token.choice,
    token_ids: token.tokenIds,
    text: token.text,
    finish_reason: token.finishReason ?? null,
    num_logprobs: token.logprobs.length,
  };
}

function resultLine(result: GenerationResult, index: number): Record<string, unknown> {
  return {
    event: "result",
    call: index,
    request_id: result.requestId,
    model: result.model,
    choices: result.choices.map((choice) => ({
      text: choice.text,
      token_ids: choice.tokenIds,
      finish_reason: choice.finishReason,
      stop_string: choice.stopString ?? null,
      stop_token_id: choice.stopTokenId ?? null,
      num_logprobs: choice.logprobs.length,
    })),
    usage: {
      prompt_tokens: result.usage.promptTokens,
      cached_tokens: result.usage.cachedTokens,
      output_tokens: result.usage.outputTokens,
    },
    seed: result.seed,
    agent_id: result.agentId,
    num_resumes: result.numResumes,
  };
}
