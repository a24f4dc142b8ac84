export { addressOf, TrellisClient, type Answer, type CallOptions, type ClientOptions, type PathOf } from "./client";
export { follow, type FollowOptions, type LiveEvent } from "./live";
export { GatewayUnreachable, ProblemError, type ProblemDocument } from "./problem";
export { SseParser, type ServerSentEvent, type SseListener } from "./sse";
export type { components, paths } from "./schema";
