/** The gateway, as every screen calls it, and the shapes of its documents. */

import { TrellisClient, type components } from "@trellis/client";
import { session } from "./session";

export const api = new TrellisClient({ token: () => session.value?.token ?? null });

type Schemas = components["schemas"];
export type AgentDetail = Schemas["AgentDetail"];
export type AgentListed = Schemas["AgentShape"];
export type MemoryChange = Schemas["MemoryChange"];
export type Artifact = Schemas["Artifact"];
export type ArtifactListed = Schemas["ArtifactListed"];
export type Proposal = Schemas["ProposalShape"];
export type ProposalDiff = Schemas["ProposalDiff"];
export type RunListed = Schemas["RunListed"];
export type RunStatus = Schemas["RunStatus"];
export type JobListed = Schemas["JobListed"];
export type EventShape = Schemas["EventShape"];
export type EventListed = Schemas["EventListed"];
export type DeadLetter = Schemas["DeadLetterShape"];
export type StepFile = Schemas["StepFile"];
export type LifecycleShape = Schemas["LifecycleShape"];
export type WorkerListed = Schemas["WorkerShape"];
export type QueueListed = Schemas["QueueShape"];
export type ScheduleListed = Schemas["ScheduleShape"];
export type AlertListed = Schemas["AlertShape"];
export type Explanation = Schemas["ExplanationShape"];
export type Simulation = Schemas["SimulationShape"];

/** The states in which nothing happens any more until somebody acts: what is in one of them is not asked for again. */
const RESTING: Record<string, readonly string[]> = {
  run: ["completed", "failed"],
  "leased-job": ["succeeded", "failed", "cancelled", "dead_lettered", "discarded"],
  "queue-job": ["COMPLETE", "DEAD", "DISCARDED"],
  "bus-job": ["SUCCEEDED", "FAILED", "CANCELLED", "DENIED", "TIMEOUT"],
  "nlm-job": ["DONE", "ERROR"],
};

export function hasEnded(lifecycle: string, status: string | undefined): boolean {
  return status !== undefined && RESTING[lifecycle]?.includes(status) === true;
}
