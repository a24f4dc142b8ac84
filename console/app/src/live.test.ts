import { InfiniteQueryObserver, QueryObserver } from "@tanstack/react-query";
import type { LiveEvent } from "@trellis/client";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

vi.stubGlobal("sessionStorage", { getItem: () => null });
vi.stubGlobal("localStorage", { getItem: () => null });
vi.stubGlobal("navigator", { language: "en", languages: ["en"] });
const { gaps, gather, queries } = await import("./live");
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
      meta: rowsBy("run_id"),
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
});
