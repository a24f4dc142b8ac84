import { describe, expect, it } from "vitest";
import { servedBy, stuckOf, type QueueState } from "./stuck";

const queue = (type: string, more: Partial<QueueState> = {}): QueueState => ({
  type, lifecycle: "leased-job", ready: 1, held: 0, paused: false, oldest_ready_s: 5, ...more,
});
const alive = { name: "shop-1", state: "alive", held: 0, info: { types: ["a", "b", "c"] } };

describe("stuckOf", () => {
  it("names queues that nobody takes from, paused ones, slow ones, and silent workers", () => {
    const queues = [
      queue("a"),
      queue("b", { paused: true }),
      queue("c", { oldest_ready_s: 301 }),
      queue("d", { oldest_ready_s: 7, ready: 4 }),
      queue("e", { ready: 0, paused: true }),
      queue("agent-run", { lifecycle: "run" }),
    ];
    const workers = [alive, { name: "shop-2", state: "silent", held: 2, info: { types: ["d"] } }];
    expect(stuckOf(queues, workers).map((one) => `${one.name} ${one.why} ${one.jobs}`)).toEqual([
      "c slow 1",
      "d no-worker 4",
      "b paused 1",
      "shop-2 silent 2",
    ]);
  });

  it("reads what a worker reports, whatever it is", () => {
    expect([servedBy({ types: ["a"] }), servedBy(null), servedBy({ types: 3 })]).toEqual([["a"], [], []]);
  });
});
