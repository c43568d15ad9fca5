/** When a failed request is sent again, resumed or given up, and after how long. Pure: time and chance are given. */

import { type DragomanError, invalid, TransportError } from "./errors.js";

/** How often one stream may be continued. */
export const MAX_RESUMES = 3;

/**
 * How hard a client tries.
 *
 * A request of which nothing was delivered is asked for `maxAttempts` times in all. One that was cut in the middle is worth
 * more: it is pursued for `resumePatienceSeconds` after the cut, through at most 3 resumes; for `refusedPatienceSeconds` only
 * while every connection is refused, which is how a stopped server looks. Delays double from `baseSeconds` up to
 * `maxDelaySeconds`, each shortened at random by up to a half; a delay that the server named is the least. `budget` limits the
 * retries of one client: each costs 1, each accepted request gives back a tenth, so that many failing requests do not become
 * a storm.
 */
export interface RetryPolicy {
  readonly maxAttempts: number;
  readonly baseSeconds: number;
  readonly maxDelaySeconds: number;
  readonly resumePatienceSeconds: number;
  readonly refusedPatienceSeconds: number;
  readonly budget: number;
}

/** What a client uses unless told otherwise. */
export const DEFAULT_RETRY_POLICY: RetryPolicy = {
  maxAttempts: 4,
  baseSeconds: 0.1,
  maxDelaySeconds: 5,
  resumePatienceSeconds: 30,
  refusedPatienceSeconds: 5,
  budget: 50,
};

/** The defaults with what is given in their place. Throws invalid_request. */
export function retryPolicyOf(given: Partial<RetryPolicy>): RetryPolicy {
  const policy = { ...DEFAULT_RETRY_POLICY, ...given };
  for (const [name, value] of Object.entries(policy) as [string, unknown][]) {
    if (!Object.hasOwn(DEFAULT_RETRY_POLICY, name)) {
      throw invalid(`retry.${name}`, `is not known; a policy has ${Object.keys(DEFAULT_RETRY_POLICY).join(", ")}`);
    }
    if (typeof value !== "number" || !(value >= 0)) {
      throw invalid(`retry.${name}`, `must be a number of at least 0, not ${String(value)}`);
    }
  }
  if (policy.maxAttempts < 1) {
    throw invalid("retry.maxAttempts", "must be at least 1");
  }
  return policy;
}

/** Seconds to wait after failure number `numFailures`, from 1 on. `chance` is in [0, 1). */
export function delayAfter(policy: RetryPolicy, numFailures: number, error: DragomanError, chance: number): number {
  const longest = Math.min(policy.baseSeconds * 2 ** Math.min(numFailures - 1, 30), policy.maxDelaySeconds);
  return Math.max(longest * (0.5 + 0.5 * chance), error.retryDelaySeconds ?? 0);
}

/** What is left of `RetryPolicy.budget`, in tenths: ten successes must make one retry exactly. Owned by one client. */
export class RetryBudget {
  readonly #capacity: number;
  #left: number;

  constructor(capacity: number) {
    this.#capacity = this.#left = Math.round(capacity * 10);
  }

  /** Pays for one retry; false when there is nothing left for it. */
  spend(): boolean {
    if (this.#left < 10) {
      return false;
    }
    this.#left -= 10;
    return true;
  }

  /** Gives a tenth of a retry back. */
  succeeded(): void {
    this.#left = Math.min(this.#capacity, this.#left + 1);
  }
}

/** What to do about a failure: same request with a new ticket, the next attempt from the last cursor, or nothing. */
export type Step = "give up" | "ask again" | "resume";

/**
 * Whether a refusal may be another answer later or at another agent. A resume can reach the agent it was cut from before that
 * agent has noticed the cut: the request is still under way there.
 */
export function mayPass(error: DragomanError, resuming: boolean): boolean {
  return error.retryable || (resuming && error.reason === "duplicate_request");
}

/** What the reason of a failure asks for. `accepted`: the agent had started the request on this attempt. */
export function stepAfter(error: DragomanError, accepted: boolean, resuming: boolean): Step {
  const { reason } = error;
  if (reason === "agent_lost" || reason === "device_fault") {
    return "resume"; // where it was not accepted it may have run all the same
  }
  if (accepted) {
    return reason === "agent_draining" || reason === "credit_timeout" ? "resume" : "give up";
  }
  return mayPass(error, resuming) ? "ask again" : "give up";
}

/** What to do, and after how many seconds. */
export interface Decision {
  readonly step: Step;
  readonly delaySeconds: number;
}

const GIVE_UP: Decision = { step: "give up", delaySeconds: 0 };

/** What a failure is judged by. Times are in seconds of one clock. */
export interface Circumstances {
  /** The agent had started the request on this attempt. */
  readonly accepted: boolean;
  /** There is a stream to be continued; where there is none, a lost agent is answered by asking again. */
  readonly hasOrigin: boolean;
  readonly now: number;
  /** When the request is over anyway. */
  readonly deadline: number | undefined;
  /** In [0, 1). */
  readonly chance: number;
}

/**
 * Owner of what has gone wrong with one generation so far. The first cut is answered at once; what fails after it, until
 * tokens flow again, after growing delays.
 */
export class Pursuit {
  readonly #policy: RetryPolicy;
  #numResumes = 0;
  #cut: DragomanError | undefined;
  #cutTime = 0;
  #refusedSince: number | undefined;
  #wasStarted = false;
  #numFailures = 0;

  constructor(policy: RetryPolicy) {
    this.#policy = policy;
  }

  get numResumes(): number {
    return this.#numResumes;
  }

  /** What cut the stream, until it goes on. */
  get cut(): DragomanError | undefined {
    return this.#cut;
  }

  /** An agent accepted the request, for the first time or again. */
  started(): void {
    this.#wasStarted = true;
  }

  /** Tokens came: what went wrong before is over. */
  flowed(): void {
    this.#numFailures = 0;
    this.#cut = undefined;
  }

  /** Decides; a resume is counted. */
  failed(error: DragomanError, circumstances: Circumstances): Decision {
    let step = stepAfter(error, circumstances.accepted, this.#numResumes > 0);
    if (step === "resume" && !circumstances.hasOrigin) {
      step = "ask again";
    }
    if (step === "give up" || (step === "resume" && this.#numResumes >= MAX_RESUMES)) {
      return GIVE_UP;
    }
    const delaySeconds = this.#delay(error, circumstances);
    if (delaySeconds === undefined) {
      return GIVE_UP;
    }
    if (step === "resume") {
      this.#numResumes += 1;
    }
    return { step, delaySeconds };
  }

  #delay(error: DragomanError, { now, deadline, chance }: Circumstances): number | undefined {
    const policy = this.#policy;
    const refused = error instanceof TransportError && error.refused;
    this.#refusedSince = refused ? (this.#refusedSince ?? now) : undefined;
    if (this.#wasStarted && this.#cut === undefined) {
      this.#cut = error;
      this.#cutTime = now;
      return 0;
    }
    this.#numFailures += 1;
    const delay = delayAfter(policy, this.#numFailures, error, chance);
    if (deadline !== undefined && now + delay >= deadline) {
      return undefined;
    }
    if (!this.#wasStarted) {
      return this.#numFailures < policy.maxAttempts ? delay : undefined;
    }
    let patienceLeft = this.#cutTime + policy.resumePatienceSeconds - now;
    if (this.#refusedSince !== undefined) {
      patienceLeft = Math.min(patienceLeft, this.#refusedSince + policy.refusedPatienceSeconds - now);
    }
    return delay <= patienceLeft ? delay : undefined;
  }
}
