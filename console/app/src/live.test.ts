import { InfiniteQueryObserver, QueryObserver } from "@tanstack/react-query";
import type { LiveEvent } from "@trellis/client";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

vi.stubGlobal("sessionStorage", { getItem: () => null, removeItem: () => undefined });
vi.stubGlobal("localStorage", { getItem: () => null });
vi.stubGlobal("navigator", { language: "en", languages: ["en"] });
const { endSession, gaps, gather, mode, poll, POLL_MS, POLL_SLOW_MS, queries, runEnded } = await import("./live");
const { lettersQuery } = await import("./letters");
const { toasts } = await import("./components/parts");
const { language } = await import("./preferences");
const { rowsBy } = await import("./lib/pages");

const SLOW_MS = 3_000;
const event = (runId: string): LiveEvent => ({ id: "1", type: "run.status.changed", runId, status: "running" });

/** A gateway that answers each request after `ms`, with what is true when it answers. */
function slow<T>(ms: number, answer: () => T) {
  const seen = { asked: 0, atOnce: 0, most: 0, cancelled: 0 };
  const ask = (signal: AbortSignal): Promise<T> => {
    seen.asked += 1;
    seen.most = Math.max(seen.most, (seen.atOnce += 1));
    signal.addEventListener("abort", () => (seen.cancelled += 1));
    return new Promise((resolve) => setTimeout(() => ((seen.atOnce -= 1), resolve(answer())), ms));
  };
  return { seen, ask };
}

describe("events", () => {
  beforeEach(() => void vi.useFakeTimers());
  afterEach(() => {
    queries.clear();
    vi.useRealTimers();
  });

  it("that never pause show what a slow gateway answers, with one request at a time", async () => {
    let steps = 0;
    const { seen, ask } = slow(SLOW_MS, () => steps);
    const observer = new QueryObserver(queries, { queryKey: ["run", "r1"], queryFn: ({ signal }) => ask(signal) });
    const shown: number[] = [];
    const end = observer.subscribe((result) => result.data !== undefined && shown.at(-1) !== result.data && shown.push(result.data));
    for (let at = 0; at < 100; at += 1) {
      steps = at;
      gather(event("r1"));
      await vi.advanceTimersByTimeAsync(200);
    }
    expect(shown.length).toBeGreaterThanOrEqual(5);
    expect(seen).toMatchObject({ most: 1, cancelled: 0 });
    expect(seen.asked).toBeLessThanOrEqual(8);
    await vi.advanceTimersByTimeAsync(3 * SLOW_MS);
    expect(shown.at(-1)).toBe(99);
    const before = seen.asked;
    await vi.advanceTimersByTimeAsync(60_000);
    expect(seen.asked).toBe(before);
    end();
  });

  it("tell once that a run has ended, with its status in the language of the person", () => {
    const texts = () => toasts.value.map((one) => one.text);
    runEnded("run_1", "completed");
    expect(texts()).toEqual(["completed: run_1"]);
    runEnded("run_1", "completed");
    expect(texts()).toHaveLength(1);
    language.set("uk");
    runEnded("run_2", "failed");
    language.set("en");
    expect(texts().at(-1)).toBe("не вдалося: run_2");
    vi.advanceTimersByTime(60_000);
    expect(texts()).toEqual([]);
  });

  it("of a session that has ended leave nothing to the next one", () => {
    queries.setQueryData(["run", "r1"], { status: "running" });
    gaps.set(new Set(["runs"]));
    runEnded("run_3", "completed");
    endSession();
    expect([queries.getQueryCache().getAll().length, gaps.value.size, toasts.value.length]).toEqual([0, 0, 0]);
    runEnded("run_3", "completed");
    expect(toasts.value.map((one) => one.text)).toEqual(["completed: run_3"]);
    vi.advanceTimersByTime(60_000);
  });

  it("that do not come are made up for by the answered status: a run that was open and has ended is told of once", async () => {
    const answers: Record<string, string[]> = { seen: ["running", "running", "completed", "completed"], late: ["completed"] };
    const texts = () => toasts.value.map((one) => one.text);
    for (const [id, statuses] of Object.entries(answers)) {
      const observer = new QueryObserver(queries, { queryKey: ["run", id], queryFn: () => ({ status: statuses.shift() }) });
      const end = observer.subscribe(() => {});
      await vi.advanceTimersByTimeAsync(100);
      while (statuses.length > 0) await observer.refetch();
      end();
    }
    expect(texts()).toEqual(["completed: seen"]);
    vi.advanceTimersByTime(60_000);
  });

  const PAGE = 10;
  /** Rows of a list, newest first, by a cursor as the gateway has it: the last id of the page before. */
  function listed(rows: { run_id: string; status: string }[]) {
    const asked: (string | null)[] = [];
    const load = async (cursor: string | null) => {
      asked.push(cursor);
      await new Promise((resolve) => setTimeout(resolve, 50));
      const from = cursor === null ? 0 : rows.findIndex((one) => one.run_id < cursor);
      const items = from < 0 ? [] : rows.slice(from, from + PAGE).map((one) => ({ ...one }));
      const more = from >= 0 && from + PAGE < rows.length;
      return { items, next_cursor: more ? (items.at(-1)?.run_id ?? null) : null };
    };
    const observer = new InfiniteQueryObserver(queries, {
      queryKey: ["runs", "all"],
      meta: rowsBy("run_id", true),
      queryFn: ({ pageParam }) => load(pageParam),
      initialPageParam: null as string | null,
      getNextPageParam: (page) => page.next_cursor,
    });
    const ids = () => (observer.getCurrentResult().data?.pages ?? []).flatMap((page) => page.items.map((one) => one.run_id));
    const statusOf = (id: string) => observer.getCurrentResult().data?.pages.flatMap((page) => page.items).find((one) => one.run_id === id)?.status;
    return { asked, observer, ids, statusOf };
  }
  const name = (n: number) => `r${String(n).padStart(4, "0")}`;
  const row = (n: number) => ({ run_id: name(n), status: "queued" });

  async function withSixPages() {
    const rows = Array.from({ length: 60 }, (_, at) => row(60 - at));
    const list = listed(rows);
    const end = list.observer.subscribe(() => {});
    await vi.advanceTimersByTimeAsync(100);
    for (let at = 0; at < 5; at += 1) {
      void list.observer.fetchNextPage();
      await vi.advanceTimersByTimeAsync(100);
    }
    expect(list.ids()).toEqual(rows.map((one) => one.run_id));
    list.asked.length = 0;
    return { rows, ...list, end };
  }

  it("load the first page of a list again and the page of the row, not all pages", async () => {
    const { rows, asked, ids, statusOf, end } = await withSixPages();
    const changed = rows[35] as { run_id: string; status: string };
    changed.status = "running";
    rows.unshift(row(61), row(62));
    rows.sort((a, b) => b.run_id.localeCompare(a.run_id));
    gather(event(changed.run_id));
    gather(event(name(62)));
    await vi.advanceTimersByTimeAsync(1_000);
    expect(asked).toEqual([null, name(31)]);
    expect(ids()).toEqual(rows.map((one) => one.run_id));
    expect(statusOf(changed.run_id)).toBe("running");
    end();
  });

  it("say that a long list has grown by more than a page, and leave what is read in place", async () => {
    const { rows, asked, ids, end } = await withSixPages();
    const before = ids();
    rows.unshift(...Array.from({ length: 30 }, (_, at) => row(90 - at)));
    gather(event(name(90)));
    await vi.advanceTimersByTimeAsync(1_000);
    expect(asked).toEqual([null]);
    expect(ids()).toEqual(before);
    expect(gaps.value.size).toBe(1);
    end();
  });

  it("reach a row that newer ones have pushed out of the first page", async () => {
    const { rows, asked, ids, statusOf, end } = await withSixPages();
    for (let at = 61; at <= 75; at += 1) {
      rows.unshift(row(at));
      gather(event(name(at)));
      await vi.advanceTimersByTimeAsync(1_000);
    }
    expect(ids()).toEqual(rows.map((one) => one.run_id));
    const pushed = rows.find((one) => one.run_id === name(60)) as { status: string };
    pushed.status = "running";
    asked.length = 0;
    gather(event(name(60)));
    await vi.advanceTimersByTimeAsync(1_000);
    expect(statusOf(name(60))).toBe("running");
    expect(asked.length).toBeLessThanOrEqual(2);
    end();
  });

  it("take a row that has left out of the first page, also when it was the last there", async () => {
    const { rows, ids, end } = await withSixPages();
    rows.splice(9, 1);
    gather(event(name(51)));
    await vi.advanceTimersByTimeAsync(1_000);
    expect(ids()).toEqual(rows.map((one) => one.run_id));
    end();
  });

  describe("that do not come", () => {
    let stop = () => {};
    beforeEach(() => {
      stop = poll();
      mode.set("polling");
      gaps.set(new Set());
    });
    afterEach(() => {
      stop();
      mode.set("connecting");
    });

    it("are made up for by polling all pages of a long list in turn, a few at a time", async () => {
      const { rows, asked, ids, statusOf, end } = await withSixPages();
      rows.unshift(row(61));
      for (const one of rows) one.status = "running";
      asked.length = 0;
      const turns = [];
      for (let turn = 0; turn < 3; turn += 1) {
        await vi.advanceTimersByTimeAsync(POLL_MS);
        turns.push(asked.splice(0).length);
      }
      expect(turns.every((count) => count >= 1 && count <= 3)).toBe(true);
      expect(ids()).toEqual(rows.map((one) => one.run_id));
      await vi.advanceTimersByTimeAsync(2 * POLL_MS);
      expect(rows.filter((one) => statusOf(one.run_id) !== "running")).toEqual([]);
      end();
    });

    it("leave a notice where a long list has grown by more than a page", async () => {
      const { rows, ids, end } = await withSixPages();
      const before = ids();
      rows.unshift(...Array.from({ length: 30 }, (_, at) => row(90 - at)));
      await vi.advanceTimersByTimeAsync(POLL_MS);
      expect(ids()).toEqual(before);
      expect(gaps.value.size).toBe(1);
      end();
    });

    it("are not made up for while events come or nobody looks", async () => {
      const { asked, end } = await withSixPages();
      asked.length = 0;
      for (const one of ["live", "paused"] as const) {
        mode.set(one);
        await vi.advanceTimersByTimeAsync(POLL_SLOW_MS);
      }
      expect(asked).toEqual([]);
      end();
    });
  });
});

describe("dead letters", () => {
  const PAGES = 20;
  const letters = Array.from({ length: PAGES * 200 }, (_, at) => ({ job_id: `j${String(9_999 - at)}`, type: "mail.send" }));
  const asked: URL[] = [];
  const job = (jobId: string, status: string): LiveEvent => ({ id: "1", type: "job.status.changed", jobId, lifecycle: "leased-job", status });

  beforeEach(async () => {
    vi.useFakeTimers();
    vi.stubGlobal("location", { origin: "http://gateway" });
    vi.stubGlobal("fetch", (address: string | URL) => {
      const url = new URL(String(address), "http://gateway");
      asked.push(url);
      const cursor = url.searchParams.get("cursor");
      const from = cursor === null ? 0 : letters.findIndex((one) => one.job_id < cursor);
      const items = letters.slice(from, from + 200);
      const body = { items, next_cursor: from + 200 < letters.length ? items.at(-1)?.job_id : null };
      return Promise.resolve(new Response(JSON.stringify(body), { headers: { "Content-Type": "application/json" } }));
    });
  });
  afterEach(() => {
    queries.clear();
    vi.useRealTimers();
  });

  it("of which one changes are asked for again in a few pages, and none for jobs that are no dead letters", async () => {
    const observer = new InfiniteQueryObserver(queries, lettersQuery({}));
    const end = observer.subscribe(() => {});
    await vi.advanceTimersByTimeAsync(100);
    for (let at = 1; at < PAGES; at += 1) {
      await observer.fetchNextPage();
    }
    const ids = () => (observer.getCurrentResult().data?.pages ?? []).flatMap((page) => page.items.map((one) => one.job_id));
    expect(ids()).toHaveLength(letters.length);

    asked.length = 0;
    gather(job("another", "running"));
    gather(job("another", "succeeded"));
    await vi.advanceTimersByTimeAsync(1_000);
    expect(asked).toHaveLength(0);

    const [left] = letters.splice(2_500, 1);
    gather(job(left?.job_id ?? "", "queued"));
    await vi.advanceTimersByTimeAsync(1_000);
    expect(asked.length).toBeLessThanOrEqual(3);
    expect(ids()).not.toContain(left?.job_id);

    asked.length = 0;
    letters.splice(3_000, 0, { job_id: `${letters[2_999]?.job_id ?? ""}`.replace(/$/, "-"), type: "mail.send" });
    letters.sort((a, b) => (a.job_id < b.job_id ? 1 : -1));
    const entered = letters.find((one) => one.job_id.endsWith("-"))?.job_id ?? "";
    let events = 0;
    while (!ids().includes(entered) && events < PAGES) {
      gather(job(entered, "dead_lettered"));
      await vi.advanceTimersByTimeAsync(1_000);
      events += 1;
    }
    expect(ids()).toEqual(letters.map((one) => one.job_id));
    expect(asked.length).toBeLessThanOrEqual(3 * events);
    end();
  });
});
