/** What a proposal was made from, as the files of its run have it. */

import type { Proposal, StepFile } from "../api";

interface SeenSource {
  ref?: unknown;
  text?: unknown;
  sha256?: unknown;
}

/** The sources that a run has read. */
export function sourcesOf(steps: readonly Pick<StepFile, "result">[]): SeenSource[] {
  const listed = steps.flatMap((step): unknown[] => (Array.isArray(step.result["sources"]) ? (step.result["sources"] as unknown[]) : []));
  return listed.filter((one): one is SeenSource => typeof one === "object" && one !== null);
}

/** The text that the proposal was made for: the one with its hash among the sources of the run; null if there is none. */
export function seenText(proposal: Pick<Proposal, "target" | "target_hash">, steps: readonly Pick<StepFile, "result">[]): string | null {
  const seen = sourcesOf(steps).find((one) => one.ref === proposal.target && one.sha256 === proposal.target_hash);
  return typeof seen?.text === "string" ? seen.text : null;
}
