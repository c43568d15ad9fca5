/** The TypeScript client of Dragoman: token streams that resume by themselves. */

export { AgentState } from "../gen/dragoman/v1/agent.js";
export type { FleetMember } from "../gen/dragoman/v1/fleet_service.js";
export type { GetHardwareResponse } from "../gen/dragoman/v1/hardware_service.js";
export type { AgentLoadSample } from "../gen/dragoman/v1/telemetry_service.js";
export type { ReasonName } from "./catalogue.js";
export {
  Client,
  type ClientConfig,
  DEFAULT_CONTROLLER,
  type DetokenizeOptions,
  type EmbedOptions,
  type TokenizeOptions,
} from "./client.js";
export { DragomanError, type ErrorFacts, type Reason } from "./errors.js";
export type { CallOptions, Form, GenerateOptions, Message, Priority, Prompt } from "./request.js";
export type {
  Choice,
  Embeddings,
  Estimate,
  FinishReason,
  GenerationResult,
  Quote,
  Timings,
  Token,
  TokenLogprob,
  TopLogprob,
  Usage,
} from "./results.js";
export { DEFAULT_RETRY_POLICY, type RetryPolicy } from "./retry.js";
export type { GenerationStream } from "./stream.js";
