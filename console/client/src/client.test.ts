import { afterEach, describe, expect, it, vi } from "vitest";
import { newKey, TrellisClient } from "./client.js";

describe("the key of a change", () => {
  afterEach(() => vi.unstubAllGlobals());

  it("is made where the browser has no crypto.randomUUID, and differs from act to act", async () => {
    vi.stubGlobal("crypto", { getRandomValues: crypto.getRandomValues.bind(crypto) });
    const keys: (string | null)[] = [];
    const fetch = async (_: RequestInfo | URL, init?: RequestInit): Promise<Response> => {
      keys.push(new Headers(init?.headers).get("Idempotency-Key"));
      return new Response("{}");
    };
    const client = new TrellisClient({ token: () => "t", fetch });
    for (let n = 0; n < 2; n += 1) await client.post("/dlq/requeue", { body: { job_ids: ["a"], limit: 1 } });
    expect(new Set([...keys, newKey()]).size).toBe(3);
    for (const one of keys) expect(one).toMatch(/^[0-9a-f]{32}$/);
  });
});
