import { describe, expect, it } from "vitest";
import { parseFilter } from "./filter";
import { filterOfGroup, fingerprint, gatewayFilter, grouped, requeueCounted } from "./letters";

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

describe("filterOfGroup", () => {
  it("is the filter that selects just the group, or null where it would select more", () => {
    const alone = [letter("1", "timeout"), letter("2", "timeout"), letter("3", "timeout", "page.fetch")];
    const [mail, page] = grouped(alone);
    if (mail === undefined || page === undefined) throw new Error("two groups");
    expect(filterOfGroup(mail, alone, {})).toEqual({ type: "mail.send", reason_code: "max_attempts" });
    expect(filterOfGroup(page, alone, { lifecycle: "leased-job" })).toEqual({ type: "page.fetch", reason_code: "max_attempts", lifecycle: "leased-job" });
    expect(filterOfGroup(mail, [...alone, letter("4", "no such user")], {})).toBeNull();
  });
});

describe("requeueCounted", () => {
  /** As the gateway answers: a refused job keeps its status, and has a reason. */
  const answer = (job_id: string, requeued: boolean) =>
    requeued ? { job_id, requeued, status: "queued", version: 3 } : { job_id, requeued, status: "running", reason: "wrong_state" };

  async function requeued(by: "filter" | "ids", total: number, pieces: boolean[][]) {
    const asked: [number, number][] = [];
    const seen: number[] = [];
    const result = await requeueCounted(
      total,
      2,
      by,
      async (from, count) => {
        asked.push([from, count]);
        return (pieces.shift() ?? []).map((one, at) => answer(`${from}.${at}`, one));
      },
      (progress) => seen.push(progress.done + progress.failed),
      new AbortController().signal,
    );
    return { ...result, asked, seen };
  }

  it("requeues as many as were counted and not more", async () => {
    const result = await requeued("filter", 3, [[true, true], [true], [true]]);
    expect(result).toEqual({ done: 3, failed: 0, asked: [[0, 2], [2, 1]], seen: [2, 3] });
  });

  it("counts a refused job as refused, although it has a status", async () => {
    expect(await requeued("filter", 3, [[true, false], [true]])).toMatchObject({ done: 2, failed: 1 });
  });

  it("ends with a filter when others took the rest, and when a whole piece is refused", async () => {
    expect((await requeued("filter", 9, [[true, false], []])).asked).toEqual([[0, 2], [2, 2]]);
    expect(await requeued("filter", 9, [[false, false], [true]])).toMatchObject({ done: 0, failed: 2, asked: [[0, 2]] });
  });

  it("asks for every id, also after a piece that was refused whole", async () => {
    const result = await requeued("ids", 5, [[false, false], [true, true], [true]]);
    expect(result).toMatchObject({ done: 3, failed: 2, asked: [[0, 2], [2, 2], [4, 1]] });
  });

  it("begins no piece after it was stopped", async () => {
    const stop = new AbortController();
    const asked: number[] = [];
    const requeue = async (from: number) => {
      asked.push(from);
      return [answer(`${from}.0`, true)];
    };
    await expect(requeueCounted(3, 1, "ids", requeue, () => stop.abort(), stop.signal)).rejects.toThrow();
    expect(asked).toEqual([0]);
  });
});
