import { describe, expect, it } from "vitest";
import { diagramOf, finalStates, movesFrom, pathOf, type Lifecycle } from "./lifecycle";

const step = (source: string | null, target: string, trigger: string, actors = ["orchestrator"]) => ({
  source,
  target,
  trigger,
  actors,
  event: `run.${target}`,
});
const RUN: Lifecycle = {
  name: "run",
  states: ["requested", "queued", "running", "completed", "failed"],
  transitions: [
    step(null, "requested", "submit"),
    step("requested", "queued", "accept"),
    step("queued", "running", "claim"),
    step("running", "running", "step"),
    step("running", "completed", "complete"),
    step("running", "failed", "fail"),
    step("running", "failed", "cancel", ["control-plane"]),
    step("requested", "failed", "cancel"),
  ],
};

describe("diagramOf", () => {
  it("puts states in the order of the way, and final states at the end", () => {
    expect(diagramOf(RUN).boxes).toEqual([
      { state: "requested", column: 0, row: 0 },
      { state: "queued", column: 1, row: 0 },
      { state: "running", column: 2, row: 0 },
      { state: "completed", column: 3, row: 0 },
      { state: "failed", column: 3, row: 1 },
    ]);
    expect([...finalStates(RUN)]).toEqual(["completed", "failed"]);
  });

  it("joins transitions between the same states", () => {
    expect(diagramOf(RUN).edges.find((one) => one.source === "running" && one.target === "failed")?.triggers).toEqual(["fail", "cancel"]);
  });
});

describe("movesFrom", () => {
  it("lists what may happen next and who may do it", () => {
    expect(movesFrom(RUN, "running").map((one) => `${one.trigger} → ${one.target}: ${one.actors}`)).toEqual([
      "step → running: orchestrator",
      "complete → completed: orchestrator",
      "fail → failed: orchestrator",
      "cancel → failed: control-plane",
    ]);
    expect(movesFrom(RUN, "completed")).toEqual([]);
  });
});

describe("pathOf", () => {
  it("has each move once", () => {
    const events = [
      { payload: { from: null, to: "requested" } },
      { payload: { from: "requested", to: "queued" } },
      { payload: { from: "running", to: "running" } },
    ];
    expect([...pathOf(events)]).toEqual(["requested\nqueued"]);
  });
});
