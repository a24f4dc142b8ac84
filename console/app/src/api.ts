/** The gateway, as every screen calls it, and the shapes of its documents. */

import { TrellisClient, type components } from "@trellis/client";
import { session } from "./session";

export const api = new TrellisClient({ token: () => session.value?.token ?? null });

type Schemas = components["schemas"];
export type Proposal = Schemas["ProposalShape"];
export type RunListed = Schemas["RunListed"];
export type RunStatus = Schemas["RunStatus"];
export type JobListed = Schemas["JobListed"];
export type EventListed = Schemas["EventListed"];
export type DeadLetter = Schemas["DeadLetterShape"];
export type StepFile = Schemas["StepFile"];
export type LifecycleShape = Schemas["LifecycleShape"];

export const ENDED = new Set([
  ...["completed", "failed", "succeeded", "cancelled", "dead_lettered"],
  ...["COMPLETE", "FAILED", "CANCELLED", "DEAD", "SUCCEEDED", "TIMEOUT", "DENIED"],
  ...["applied", "rejected", "expired"],
]);
