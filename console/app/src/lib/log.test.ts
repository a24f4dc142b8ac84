import { describe, expect, it } from "vitest";
import { logOf, plainText } from "./log";

const at = (second: number) => `2026-02-14T08:00:0${second}.000Z`;

describe("logOf", () => {
  it("puts events, steps with their calls and log lines into the order of time, each on one line", () => {
    const lines = logOf(
      [
        { type: "run_started", ts: at(1), actor: "runtime", cause: null, payload: { from: "queued", to: "running" } },
        { type: "run_failed", ts: at(5), actor: "runtime", cause: "the model\nsaid no", payload: { from: "running", to: "failed", data: { code: 7 } } },
      ],
      [{ step: 0, name: "read", started_at: at(2), finished_at: at(4), calls: [{ name: "small", kind: "model", outcome: "ok", duration_ms: 12 }] } as never],
      [
        { ts: at(3), type: "job_log", data: { level: "warning", event: "slow", fields: { pages: 3 } } },
        { ts: at(3), type: "job_heartbeat", data: { done: 1 } },
      ],
    );
    expect(plainText(lines).split("\n")).toEqual([
      `${at(1)} event run_started queued → running by runtime`,
      `${at(2)} step  read (step 0) began`,
      `${at(3)} log   warning: slow {"pages":3}`,
      `${at(3)} log   job_heartbeat {"done":1}`,
      `${at(4)} step  read (step 0): model small ok in 12 ms`,
      `${at(4)} step  read (step 0) ended`,
      `${at(5)} event run_failed running → failed by runtime: the model ⏎ said no {"code":7}`,
      "",
    ]);
  });
});
