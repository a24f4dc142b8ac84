import { describe, expect, it } from "vitest";
import { callBars, callsOf, timelineOf, type TimedEvent } from "./timeline";

const at = (second: number) => `2026-02-14T08:00:${String(second).padStart(2, "0")}.000Z`;
const event = (second: number, from: string | null, to: string): TimedEvent => ({
  type: `x.${to}`,
  ts: at(second),
  payload: { from, to },
});
const NOW = Date.parse(at(40));
const shape = (events: TimedEvent[], ended: boolean) =>
  timelineOf(events, [], NOW, ended).rows.map((row) =>
    row.bars.map((bar) => `${bar.kind} ${(bar.to - bar.from) / 1000}${bar.open ? "…" : ""}`),
  );

describe("timelineOf", () => {
  it("draws the wait apart from the run", () => {
    const events = [event(0, null, "requested"), event(1, "requested", "queued"), event(3, "queued", "running"), event(9, "running", "completed")];
    expect(shape(events, true)).toEqual([["wait 3", "run 6"]]);
  });

  it("stacks attempts, and draws the wait between them as backoff", () => {
    const events = [
      event(0, null, "queued"),
      event(2, "queued", "assigned"),
      event(3, "assigned", "running"),
      event(5, "running", "queued"),
      event(15, "queued", "running"),
      event(20, "running", "succeeded"),
    ];
    expect(shape(events, true)).toEqual([
      ["wait 3", "run 2"],
      ["backoff 10", "run 5"],
    ]);
  });

  it("leaves the last bar open while it runs", () => {
    expect(shape([event(0, null, "queued"), event(10, "queued", "running")], false)).toEqual([["wait 10", "run 30…"]]);
  });

  it("ignores events that change no status, and has room for steps", () => {
    const events = [event(0, null, "queued"), event(1, "queued", "running"), event(2, "running", "running"), event(4, "running", "completed")];
    const made = timelineOf(events, [{ name: "load-context", started_at: at(1), finished_at: at(2) }], NOW, true);
    expect(made.rows.map((row) => row.label)).toEqual(["#1", "load-context"]);
    expect([made.from, made.to]).toEqual([Date.parse(at(0)), Date.parse(at(4))]);
  });

  it("is empty without events", () => {
    expect(timelineOf([], [], NOW, false).rows).toEqual([]);
  });
});

describe("calls of a step", () => {
  const call = (ms: number, outcome = "ok") => ({ name: "ask", kind: "nlm", duration_ms: ms, outcome });

  it("follow each other from the start of the step", () => {
    const bars = callBars({ calls: [call(10), call(30, "refused")] }, 1_000, 1_100);
    expect(bars.map((one) => [one.from, one.to, one.outcome])).toEqual([
      [1_000, 1_010, "ok"],
      [1_010, 1_040, "refused"],
    ]);
  });

  it("fit into the step if they ran at the same time", () => {
    const bars = callBars({ calls: [call(100), call(100)] }, 0, 100);
    expect(bars.map((one) => one.to)).toEqual([50, 100]);
    expect(bars.map((one) => one.ms)).toEqual([100, 100]);
  });

  it("are none where the file lists none", () => {
    expect([callsOf({}), callsOf({ calls: null })]).toEqual([[], []]);
  });
});
