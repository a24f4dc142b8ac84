import { describe, expect, it } from "vitest";
import { parseFilter } from "./filter";
import { fingerprint, gatewayFilter, grouped, requeueCounted } from "./letters";

const letter = (job_id: string, last_error: string, type = "mail.send") => ({
  job_id,
  type,
  lifecycle: "leased-job",
  reason_code: "max_attempts",
  last_error,
  at: "",
});

describe("grouped", () => {
  it("joins errors that differ only in ids and numbers, largest group first", () => {
    const groups = grouped([
      letter("1", "connect to 10.0.0.1:25 failed after 3 s"),
      letter("2", "no such user 'ada'"),
      letter("3", "connect to 10.0.0.7:25 failed after 12 s"),
      letter("4", "connect to 10.0.0.7:25 failed after 12 s", "page.fetch"),
    ]);
    expect(groups.map((one) => [one.type, one.letters.map((l) => l.job_id).join()])).toEqual([
      ["mail.send", "1,3"],
      ["mail.send", "2"],
      ["page.fetch", "4"],
    ]);
  });

  it("keeps the words of an error", () => {
    expect(fingerprint("job 7f1c2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d: disk full")).toBe("job …: disk full");
  });
});

describe("gatewayFilter", () => {
  const known = { type: ["mail.send", "x"], reason: ["timeout"], lifecycle: ["leased-job"] };
  const of = (text: string) => gatewayFilter(parseFilter(text, { type: {}, reason: {}, lifecycle: {}, age: { duration: true } }), known);

  it("is what the gateway evaluates as a whole", () => {
    expect(of("")).toEqual({});
    expect(of("type:mail.send reason:timeout")).toEqual({ type: "mail.send", reason_code: "timeout" });
  });

  it("is nothing where a part is compared in the browser", () => {
    for (const text of ["full", "type:mail", "age>1h", "type:mail.send host", "type:x type:mail.send", "age:1h"]) expect(of(text), text).toBeNull();
  });
});

describe("requeueCounted", () => {
  async function requeued(total: number, pieces: (string | null)[][]) {
    const asked: [number, number][] = [];
    const seen: number[] = [];
    const result = await requeueCounted(
      total,
      2,
      async (from, count) => {
        asked.push([from, count]);
        return (pieces.shift() ?? []).map((status, at) => ({ job_id: `${from}.${at}`, ...(status === null ? {} : { status }) }));
      },
      (progress) => seen.push(progress.done + progress.failed),
    );
    return { ...result, asked, seen };
  }

  it("requeues as many as were counted and not more", async () => {
    const result = await requeued(3, [["queued", "queued"], ["queued"], ["queued"]]);
    expect(result).toEqual({ done: 3, failed: 0, asked: [[0, 2], [2, 1]], seen: [2, 3] });
  });

  it("ends when others took the rest, and when a whole piece is refused", async () => {
    expect((await requeued(9, [["queued", null], []])).asked).toEqual([[0, 2], [2, 2]]);
    expect(await requeued(9, [[null, null], ["queued"]])).toMatchObject({ done: 0, failed: 2, asked: [[0, 2]] });
  });
});
