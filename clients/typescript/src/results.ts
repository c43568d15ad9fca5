/** What a client gives back: tokens while they come, results when they are complete. */

import type { LatencyEstimate, LatencyQuote } from "../gen/dragoman/v1/admission_service.js";
import {
  FinishReason as WireFinishReason,
  type TokenLogprob as WireLogprob,
} from "../gen/dragoman/v1/generation_service.js";
import { secondsOf } from "./durations.js";

/** How a choice ended. A reason of a newer version reads as "stop". */
export type FinishReason = "stop" | "length" | "cancelled";

/** One alternative to a token. */
export interface TopLogprob {
  readonly tokenId: number;
  /** Natural logarithm of the probability; finite. */
  readonly logprob: number;
  /** The token's own bytes. */
  readonly tokenBytes: Uint8Array;
}

/** Log-probability of one token. `top` holds the best alternatives, best first. */
export interface TokenLogprob extends TopLogprob {
  readonly top: readonly TopLogprob[];
}

/** One item of a stream: new tokens of one choice. */
export interface Token {
  /** What became certain with them; it may be empty while a character or a stop string is incomplete. */
  readonly text: string;
  readonly tokenIds: readonly number[];
  /** Position of the first of them in the output of the choice; it grows without gaps. */
  readonly cursor: number;
  readonly choice: number;
  readonly logprobs: readonly TokenLogprob[];
  /** Set with the last tokens of the choice. */
  readonly finishReason: FinishReason | undefined;
}

/** One complete output. */
export interface Choice {
  readonly text: string;
  readonly tokenIds: readonly number[];
  readonly finishReason: FinishReason;
  /** The stop string that matched, where one did. */
  readonly stopString: string | undefined;
  /** The token that ended it, where one did. */
  readonly stopTokenId: number | undefined;
  readonly logprobs: readonly TokenLogprob[];
}

/** Tokens used; those of the output over all choices. */
export interface Usage {
  readonly promptTokens: number;
  readonly cachedTokens: number;
  readonly outputTokens: number;
}

/**
 * Seconds. The first three are the finishing agent's own, from acceptance, and undefined where it did not say. The `client`
 * ones are seen by the client from its call on, with admission and resumes in them.
 */
export interface Timings {
  readonly queueSeconds: number | undefined;
  readonly timeToFirstTokenSeconds: number | undefined;
  readonly totalSeconds: number | undefined;
  readonly clientTimeToFirstTokenSeconds: number | undefined;
  readonly clientTotalSeconds: number;
}

/** A complete generation. `text` is that of the first choice. */
export interface GenerationResult {
  readonly requestId: string;
  readonly model: string;
  readonly text: string;
  readonly choices: readonly Choice[];
  readonly usage: Usage;
  readonly timings: Timings;
  readonly seed: bigint;
  /** The agent that finished it, "" for an open agent. */
  readonly agentId: string;
  readonly numResumes: number;
  readonly quote: Quote | undefined;
  readonly promptLogprobs: readonly TokenLogprob[];
}

/** One prediction in seconds: the middle, and the interval that holds eight in ten outcomes. */
export interface Estimate {
  readonly expectedSeconds: number;
  readonly p10Seconds: number;
  readonly p90Seconds: number;
}

/** What the controller predicts for a request, and the agent it would go to. */
export interface Quote {
  readonly timeToFirstToken: Estimate;
  readonly timePerOutputToken: Estimate;
  readonly finish: Estimate;
  readonly agentId: string;
}

/** One vector of Euclidean norm 1 an input, in order. */
export interface Embeddings {
  readonly vectors: readonly (readonly number[])[];
  readonly promptTokens: number;
}

export function finishReasonOf(reason: WireFinishReason | undefined): FinishReason {
  switch (reason) {
    case WireFinishReason.LENGTH:
      return "length";
    case WireFinishReason.CANCELLED:
      return "cancelled";
    default:
      return "stop";
  }
}

export function logprobsOf(entries: readonly WireLogprob[]): readonly TokenLogprob[] {
  return entries.map(({ tokenId, logprob, tokenBytes, top }) => ({ tokenId, logprob, tokenBytes, top }));
}

export function quoteOf(quote: LatencyQuote | undefined, agentId: string): Quote | undefined {
  return (
    quote && {
      timeToFirstToken: estimateOf(quote.timeToFirstToken),
      timePerOutputToken: estimateOf(quote.timePerOutputToken),
      finish: estimateOf(quote.finish),
      agentId,
    }
  );
}

function estimateOf(estimate: LatencyEstimate | undefined): Estimate {
  return {
    expectedSeconds: secondsOf(estimate?.expected),
    p10Seconds: secondsOf(estimate?.p10),
    p90Seconds: secondsOf(estimate?.p90),
  };
}
