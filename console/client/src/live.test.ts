import { describe, expect, it } from "vitest";
import { TrellisClient } from "./client.js";
import { follow, type LiveEvent } from "./live.js";

const event = (id: string, status: string) =>
  `id: ${id}\ndata: ${JSON.stringify({ type: "run.status.changed", runId: "run_1", status })}\n\n`;

/** A gateway that answers each connection with the next of these streams. */
function gateway(...streams: (string | number)[]) {
  const asked: (string | null)[] = [];
  const answers = [...streams];
  const fetch = async (_: RequestInfo | URL, init?: RequestInit): Promise<Response> => {
    asked.push(new Headers(init?.headers).get("Last-Event-ID"));
    const next = answers.shift();
    if (next === undefined) throw new TypeError("refused");
    return typeof next === "number" ? new Response("{}", { status: next }) : new Response(next);
  };
  return { asked, client: new TrellisClient({ token: () => "t", fetch }) };
}

async function followed(streams: (string | number)[], after: string | null = null) {
  const { asked, client } = gateway(...streams);
  const seen: LiveEvent[] = [];
  const states: string[] = [];
  const stop = new AbortController();
  await follow(client, {
    after,
    signal: stop.signal,
    onEvent: (one) => seen.push(one),
    onState: (state) => states.push(state),
    wait: async () => {
      if (asked.length > streams.length) stop.abort();
    },
  });
  return { asked, states, seen: seen.map((one) => [one.id, one.status]) };
}

describe("follow", () => {
  it("goes on behind the last event after the connection broke", async () => {
    const result = await followed([event("7", "queued") + event("8", "running"), event("9", "completed")]);
    expect(result.seen).toEqual([
      ["7", "queued"],
      ["8", "running"],
      ["9", "completed"],
    ]);
    expect(result.asked).toEqual([null, "8", "9"]);
  });

  it("goes on behind a position that came without an event", async () => {
    expect((await followed(["id: 41\n\n", event("42", "queued")])).asked).toEqual([null, "41", "42"]);
  });

  it("begins anew where the position is of another ledger", async () => {
    expect((await followed([422, event("1", "queued")], "99")).asked).toEqual(["99", null, "1"]);
  });

  it("rejects where the gateway refuses the query, with a position at the second time", async () => {
    await expect(followed([422])).rejects.toMatchObject({ name: "ProblemError", status: 422 });
    await expect(followed([422, 422, 422], "99")).rejects.toMatchObject({ name: "ProblemError", status: 422 });
  });

  it("ends when the token is refused", async () => {
    const result = await followed([401]);
    expect(result.asked).toEqual([null]);
    expect(result.states).toEqual(["broken"]);
  });
});
