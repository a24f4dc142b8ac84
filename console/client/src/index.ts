export { addressOf, TrellisClient, type Answer, type CallOptions, type ClientOptions, type PathOf } from "./client.js";
export { follow, type FollowOptions, type LiveEvent } from "./live.js";
export { GatewayUnreachable, ProblemError, type ProblemDocument } from "./problem.js";
export { SseParser, type ServerSentEvent, type SseListener } from "./sse.js";
export type { components, paths } from "./schema.js";
