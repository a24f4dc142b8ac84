/** What an agent left in a run, as the files of its steps have it. */

import type { StepFile } from "../api";

export interface RunOutcome {
  summary: string | null;
  /** Each call that was refused to the agent's model: which one, and why. A repeated annotation is none of them. */
  refused: string[];
}

export function outcomeOf(steps: readonly Pick<StepFile, "name" | "result">[]): RunOutcome {
  const summary = steps.find((one) => one.name === "execute-agent")?.result["summary"];
  const refused = steps.flatMap((one): unknown[] => (Array.isArray(one.result["refused"]) ? (one.result["refused"] as unknown[]) : []));
  return {
    summary: typeof summary === "string" && summary !== "" ? summary : null,
    refused: refused.filter((one): one is Record<string, unknown> => typeof one === "object" && one !== null).filter((one) => one["approved_before"] !== true).map(refusalText),
  };
}

function refusalText(refusal: Record<string, unknown>): string {
  const call = ["tool", "action", "target"].map((name) => refusal[name]).filter((one) => typeof one === "string" && one !== "");
  return `${call.join(" ")}: ${String(refusal["detail"] ?? "")}`;
}
