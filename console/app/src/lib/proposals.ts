/** What a proposal was made from, as the files of its run have it. */

import type { Proposal, StepFile } from "../api";
import type { Citation } from "./citations";

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

/** Why something is proposed: the reasons in words, the citations, and what the platform could not confirm about them. */
export interface Grounds {
  reasons: string[];
  citations: Citation[];
  /** What was noticed when the proposal was made, such as `citation_not_found:sources/a.md`. */
  flags: string[];
  /** Quotations that no source has that the agent read. */
  notFound: Citation[];
  /** Quotations from sources that the agent did not read in this run. */
  notRead: Citation[];
}

export function groundsOf(proposal: Pick<Proposal, "content">): Grounds {
  const content = proposal.content;
  // Whoever may propose may write anything into the content: what is of another form is left out.
  const listed: unknown[] = Array.isArray(content["grounds"]) ? content["grounds"] : [content];
  const several = listed.filter((one): one is Record<string, unknown> => typeof one === "object" && one !== null);
  const all = (name: string) => several.flatMap((one): unknown[] => (Array.isArray(one[name]) ? one[name] : []));
  return {
    reasons: several.map((one) => one["reasoning"]).filter((one): one is string => typeof one === "string"),
    citations: all("citations").filter(isCitation),
    flags: all("flags").map(String),
    notFound: all("not_found").filter(isCitation),
    notRead: all("not_read").filter(isCitation),
  };
}

function isCitation(value: unknown): value is Citation {
  const { ref, excerpt } = (value ?? {}) as Partial<Record<keyof Citation, unknown>>;
  return typeof ref === "string" && typeof excerpt === "string";
}
