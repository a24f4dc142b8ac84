/** A table that draws only the rows on screen, and loads the next page when its end comes near. */

import { hashKey, type QueryKey } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useCallback, useEffect, useRef, useState, type CSSProperties, type KeyboardEvent, type ReactNode } from "react";
import { gaps, startAnew } from "../live";
import { useStore } from "../store";
import { useTexts } from "../texts";
import { Failure, Loading } from "./parts";

export interface Column<T> {
  title: string;
  /** Its width as CSS grid has it. */
  width: string;
  cell: (row: T) => ReactNode;
}

const ROW_PX = 38;
const AHEAD_ROWS = 40;
/** After so many pages in which the filter found nothing, a person decides whether to search on. */
const FRUITLESS_MAX = 20;

export function VirtualTable<T>({
  label,
  rows,
  columns,
  keyOf,
  linkOf,
  hasMore,
  loadMore,
}: {
  label: string;
  rows: T[];
  columns: Column<T>[];
  keyOf: (row: T) => string;
  linkOf: (row: T) => { to: string; params: Record<string, string> };
  hasMore: boolean;
  loadMore: () => void;
}) {
  const t = useTexts();
  const body = useRef<HTMLDivElement>(null);
  const virtual = useVirtualizer({
    count: rows.length,
    getScrollElement: () => body.current,
    estimateSize: () => ROW_PX,
    overscan: 12,
    getItemKey: (at) => keyOf(rows[at] as T),
  });
  const items = virtual.getVirtualItems();
  const last = items.at(-1)?.index ?? 0;
  const fruitless = useRef({ rows: -1, loads: 0 });
  const [stalled, stall] = useState(false);
  useEffect(() => {
    if (!hasMore || last < rows.length - AHEAD_ROWS) return;
    const before = fruitless.current;
    fruitless.current = before.rows === rows.length ? { rows: rows.length, loads: before.loads + 1 } : { rows: rows.length, loads: 0 };
    stall(fruitless.current.loads > FRUITLESS_MAX);
    if (fruitless.current.loads <= FRUITLESS_MAX) loadMore();
  }, [hasMore, last, rows.length, loadMore]);

  const move = (event: KeyboardEvent<HTMLDivElement>) => {
    const step = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
    const row = event.target instanceof HTMLElement ? Number(event.target.dataset["row"]) : Number.NaN;
    if (step === undefined || Number.isNaN(row)) return;
    event.preventDefault();
    const next = Math.min(Math.max(row + step, 0), rows.length - 1);
    virtual.scrollToIndex(next);
    requestAnimationFrame(() => body.current?.querySelector<HTMLElement>(`[data-row="${next}"]`)?.focus());
  };

  const style = { "--columns": columns.map((one) => one.width).join(" ") } as CSSProperties;
  return (
    <>
      <div className="grid" style={style} role="table" aria-label={label} aria-rowcount={hasMore ? -1 : rows.length + 1}>
        <div role="rowgroup">
          <div className="grid-head" role="row" aria-rowindex={1}>
            {columns.map((one) => (
              <span key={one.title} role="columnheader">
                {one.title}
              </span>
            ))}
          </div>
        </div>
        <div
          className="grid-body"
          ref={body}
          role="rowgroup"
          tabIndex={-1}
          style={{ height: `min(calc(100vh - 13rem), ${rows.length * ROW_PX + 2}px)` }}
          onKeyDown={move}
        >
          <div className="grid-inner" role="presentation" style={{ height: virtual.getTotalSize() }}>
            {items.map((item) => {
              const row = rows[item.index] as T;
              return (
                <div
                  key={item.key}
                  className="grid-row"
                  role="row"
                  aria-rowindex={item.index + 2}
                  style={{ transform: `translateY(${item.start}px)` }}
                >
                  {columns.map((one, at) => (
                    <span key={one.title} role="cell">
                      {at === 0 ? (
                        <Link {...linkOf(row)} className="stretched" data-row={item.index}>
                          {one.cell(row)}
                        </Link>
                      ) : (
                        one.cell(row)
                      )}
                    </span>
                  ))}
                </div>
              );
            })}
          </div>
        </div>
      </div>
      <p className="quiet" role="status">
        {t(hasMore ? "common.rows.more" : rows.length === 1 ? "common.row" : "common.rows", { n: rows.length.toLocaleString() })}
      </p>
      {stalled && hasMore && (
        <button
          type="button"
          onClick={() => {
            fruitless.current = { rows: -1, loads: 0 };
            stall(false);
            loadMore();
          }}
        >
          {t("common.more")}
        </button>
      )}
    </>
  );
}

/** What a paged query has; `useInfiniteQuery` gives it. */
interface Listing {
  isPending: boolean;
  data: unknown;
  error: unknown;
  hasNextPage: boolean;
  isFetching: boolean;
  fetchNextPage: () => unknown;
  refetch: () => unknown;
}

/** Says that a list has grown by more than a page since it was loaded, and loads it from its beginning. */
export function NewerRows({ queryKey }: { queryKey: QueryKey }) {
  const t = useTexts();
  if (!useStore(gaps).has(hashKey(queryKey))) return null;
  return (
    <p>
      <button type="button" onClick={() => startAnew(queryKey)}>
        {t("common.changed")}
      </button>
    </p>
  );
}

/** The table of a paged query, or why there is none. */
export function PagedTable<T>({
  listing,
  queryKey,
  empty,
  ...table
}: { listing: Listing; queryKey: QueryKey; empty: ReactNode } & Omit<Parameters<typeof VirtualTable<T>>[0], "hasMore" | "loadMore">) {
  // The next page is asked for when no other request is under way, and again after one: a request that was cancelled
  // in favour of another leaves no other trace.
  const { isFetching, fetchNextPage } = listing;
  const more = useCallback(() => {
    if (!isFetching) void fetchNextPage();
  }, [isFetching, fetchNextPage]);
  if (listing.isPending) return <Loading />;
  if (listing.data === undefined) return <Failure error={listing.error} retry={() => void listing.refetch()} />;
  if (table.rows.length === 0 && !listing.hasNextPage) return empty;
  return (
    <>
      <NewerRows queryKey={queryKey} />
      <VirtualTable {...table} hasMore={listing.hasNextPage} loadMore={more} />
    </>
  );
}
