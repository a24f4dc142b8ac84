import { describe, expect, it } from "vitest";
import { outcomeOf } from "./outcome";

describe("outcomeOf", () => {
  it("has the agent's summary and each call that was refused to its model", () => {
    const repeated = { tool: "create-proposal", action: "propose-comment", target: "sources/a.md", code: "duplicate", detail: "it stands there", approved_before: true };
    const refused = [repeated, { tool: "create-proposal", action: "propose-tag", target: "sources/a.md", code: "action_not_allowed", detail: "not among safe_outputs" }];
    const steps = [
      { name: "load-context", result: {} },
      { name: "execute-agent", result: { summary: "Two dates differ.", refused } },
    ];
    expect(outcomeOf(steps)).toEqual({ summary: "Two dates differ.", refused: ["create-proposal propose-tag sources/a.md: not among safe_outputs"] });
    expect(outcomeOf([])).toEqual({ summary: null, refused: [] });
  });
});
