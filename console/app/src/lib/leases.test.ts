import { describe, expect, it } from "vitest";
import { clockOffset, leaseLeft, leaseState } from "./leases";

const AT = Date.parse("2026-01-01T00:00:00Z");

describe("leases", () => {
  it("are counted by the clock of the ledger", () => {
    const offset = clockOffset([{ seen_at: "2026-01-01T00:01:00Z", silent_s: 2.5 }], AT);
    expect(offset).toBe(62_500);
    expect(leaseLeft("2026-01-01T00:01:32.5Z", AT, offset)).toBe(30);
    expect(clockOffset([], AT)).toBe(0);
  });

  it("are short, then over", () => {
    expect([30, 9, 0, -1].map(leaseState)).toEqual(["good", "warn", "bad", "bad"]);
  });
});
