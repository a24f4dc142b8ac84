/** The events of one thing: what happened, who did it and why. */

import { useInfiniteQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { api, type EventShape } from "../api";
import { useTimes } from "../format";
import { useTexts } from "../texts";

const PAGE = 200;

/**
 * The events of a job, oldest first: the newest 200 of them, and more with each call of `older`. Every event has the
 * next version of its job, so the version of the job says where its newest events begin.
 */
export function useJobEvents(jobId: string, version: number | undefined) {
  const newest = Math.max(0, (version ?? 0) - PAGE);
  const pages = useInfiniteQuery({
    queryKey: ["job", jobId, "events", version],
    queryFn: ({ pageParam, signal }) => api.get("/jobs/{job_id}/events", { path: { job_id: jobId }, query: { cursor: pageParam, limit: PAGE }, signal }),
    initialPageParam: newest,
    getNextPageParam: (_page, _pages, from) => (from === 0 ? undefined : Math.max(0, from - PAGE)),
    enabled: version !== undefined,
    placeholderData: (before) => before,
  });
  const all = (pages.data?.pages ?? []).toReversed().flatMap((page) => page.items);
  // The oldest page is as long as the others, so it ends inside the one behind it.
  const items = [...new Map(all.map((one) => [one.version, one])).values()];
  return { items, missing: (items[0]?.version ?? 1) - 1, error: pages.error, refetch: pages.refetch, isBusy: pages.isFetchingNextPage, older: () => void pages.fetchNextPage() };
}

export function JobEvents({ events }: { events: ReturnType<typeof useJobEvents> }) {
  const t = useTexts();
  return (
    <>
      {events.missing > 0 && (
        <p className="row">
          <span className="quiet">{t("events.older", { n: events.missing.toLocaleString() })}</span>
          <button type="button" className="small" disabled={events.isBusy} onClick={events.older}>
            {t("events.older.show")}
          </button>
        </p>
      )}
      <Events items={events.items} />
    </>
  );
}

/** A table of events of one thing. `first` says that it may end before the last event, at so many. */
export function Events({ items, first }: { items: EventShape[]; first?: number }) {
  const t = useTexts();
  return (
    <div className="scroll-x">
      <table>
        <EventRows items={items} />
      </table>
      {items.length === first && <p className="quiet">{t("common.first", { n: items.length })}</p>}
    </div>
  );
}

/** A row for each event; `subject` adds what it is about, where that differs from row to row. */
export function EventRows<T extends EventShape>({ items, subject }: { items: T[]; subject?: (event: T) => ReactNode }) {
  const { full } = useTimes();
  return (
    <tbody>
      {items.map((one) => (
        <tr key={one.id}>
          <td className="nowrap quiet">{full(one.ts)}</td>
          <td className="mono">{one.type}</td>
          {subject !== undefined && <td className="mono">{subject(one)}</td>}
          <td className="mono">
            {one.payload["from"] === one.payload["to"] ? stepOf(one.payload["data"]) : `${String(one.payload["from"] ?? "·")} → ${String(one.payload["to"] ?? "·")}`}
          </td>
          <td>
            {one.actor} {subject !== undefined && <span className="quiet">{String(one.payload["role"] ?? "")}</span>}
          </td>
          <td>{one.cause}</td>
        </tr>
      ))}
    </tbody>
  );
}

/** The name of the step that an event is about, if it is about one. */
function stepOf(data: unknown): string {
  const name = typeof data === "object" && data !== null ? (data as { name?: unknown }).name : undefined;
  return typeof name === "string" ? name : "";
}
