/** What was delivered of one generation, choice by choice: the cursors, and the state that a resume sends. Pure. */

import type { ChoiceFinish, GenerationDelta, ResumeState } from "../gen/dragoman/v1/generation_service.js";
import { type Choice, finishReasonOf, logprobsOf, type Token, type TokenLogprob } from "./results.js";

/** A delta that does not continue its choice: taking it would lose or double a token. */
export class CursorGapError extends Error {}

interface Delivered {
  tokenIds: number[];
  text: string;
  logprobs: TokenLogprob[];
  finish: ChoiceFinish | undefined;
}

/** Owner of the delivered tokens of one generation. */
export class Progress {
  readonly #choices: Delivered[];
  #numOpen: number;

  constructor(numChoices: number) {
    this.#choices = Array.from({ length: numChoices }, () => ({
      tokenIds: [],
      text: "",
      logprobs: [],
      finish: undefined,
    }));
    this.#numOpen = numChoices;
  }

  /** Tokens delivered over all choices. */
  get numTokens(): number {
    return this.#choices.reduce((sum, choice) => sum + choice.tokenIds.length, 0);
  }

  /** Whether every choice has ended. */
  get complete(): boolean {
    return this.#numOpen === 0;
  }

  /**
   * The delta as an item of the stream, undefined when all of it was delivered before.
   *
   * Throws CursorGapError, and takes nothing, when it leaves tokens out, overlaps in part (its text cannot be cut), comes
   * after the end of its choice, or is of a choice that was not asked for.
   */
  take(delta: GenerationDelta): Token | undefined {
    const choice = this.#choices[delta.choiceIndex];
    const name = `choice ${String(delta.choiceIndex)}`;
    if (choice === undefined) {
      throw new CursorGapError(`${name} was not asked for`);
    }
    const cursor = Number(delta.cursor);
    const expected = choice.tokenIds.length;
    if (cursor + delta.tokenIds.length <= expected && (cursor < expected || choice.finish !== undefined)) {
      return undefined;
    }
    if (cursor !== expected) {
      throw new CursorGapError(`${name}: cursor ${String(delta.cursor)} came where ${String(expected)} is next`);
    }
    if (choice.finish !== undefined) {
      throw new CursorGapError(`${name}: tokens came after its end`);
    }
    const logprobs = logprobsOf(delta.logprobs);
    for (const id of delta.tokenIds) {
      choice.tokenIds.push(id);
    }
    choice.text += delta.text;
    choice.logprobs.push(...logprobs);
    if (delta.finish !== undefined) {
      choice.finish = delta.finish;
      this.#numOpen -= 1;
    }
    return {
      text: delta.text,
      tokenIds: delta.tokenIds,
      cursor,
      choice: delta.choiceIndex,
      logprobs,
      finishReason: delta.finish && finishReasonOf(delta.finish.reason),
    };
  }

  /** What the next agent needs to go on exactly where the last one was cut. */
  resumeState(attempt: number, originEpoch: bigint, seed: bigint): ResumeState {
    const choices = this.#choices.map(({ tokenIds, finish }, choiceIndex) => ({
      choiceIndex,
      tokenIds: { ids: tokenIds },
      finish,
    }));
    return { attempt, originEpoch, seed, choices };
  }

  /** The outputs. To be called when `complete`. */
  results(): Choice[] {
    return this.#choices.map(({ text, tokenIds, logprobs, finish }) => ({
      text,
      tokenIds,
      finishReason: finishReasonOf(finish?.reason),
      stopString: finish?.stop?.$case === "stopString" ? finish.stop.value : undefined,
      stopTokenId: finish?.stop?.$case === "stopTokenId" ? finish.stop.value : undefined,
      logprobs,
    }));
  }
}
