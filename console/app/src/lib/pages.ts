/** A list that is loaded page by page, newest first, and the parts of it that are loaded again. */

import type { InfiniteData } from "@tanstack/react-query";

export interface ListPage {
  items: object[];
  next_cursor: string | null;
}

/** How many pages one event, events that come together, or one turn of polling cause to be loaded again. */
export const PAGES_AT_ONCE = 3;
/** A page may be short although more follow: so many are asked for at most. */
const PAGES_MAX = 500;
/** A list that has so many rows does not grow by itself: a person decides when to load it anew. */
const ROWS_MAX = 20_000;
/** The id of a row, which has another name in each list. */
export type IdOf = (row: object) => string;

export interface RowsMeta extends Record<string, unknown> {
  idOf: IdOf;
  /** Whether its rows change by themselves. They are polled often; what rests is polled seldom. */
  moves: boolean;
  /** Of a list whose new rows stand anywhere: the states with which a row may enter it. Without, new rows stand first. */
  entersAs?: ReadonlySet<string>;
}

/** For the `meta` of a list whose pages are loaded again one by one: by events, and by polling while there are none. */
export function rowsBy(name: string, moves: boolean): RowsMeta {
  return { idOf: (row) => String((row as Record<string, unknown>)[name] ?? ""), moves };
}

/** Every row up to `most` of them, page by page; `bounded` if there are more. */
export async function allPages<T>(load: (cursor: string | null) => Promise<{ items: T[]; next_cursor: string | null }>, most: number): Promise<{ items: T[]; bounded: boolean }> {
  const items: T[] = [];
  let cursor: string | null = null;
  for (let page = 0; page < PAGES_MAX; page += 1) {
    const next: { items: T[]; next_cursor: string | null } = await load(cursor);
    items.push(...next.items);
    cursor = next.next_cursor ?? null;
    if (cursor === null || items.length >= most) break;
  }
  return { items, bounded: cursor !== null };
}

/** What happened, by the id that it is about: the last state that was told of it, if any was. */
export type Happened = ReadonlyMap<string, string | undefined>;

/** Whether any of it can change this list. New rows of a usual list stand first, so everything can. */
export function concerns(data: InfiniteData<ListPage>, { idOf, entersAs }: RowsMeta, ids: Happened): boolean {
  if (entersAs === undefined) return true;
  if ([...ids.values()].some((state) => state === undefined || entersAs.has(state))) return true;
  return data.pages.some((page) => page.items.some((row) => ids.has(idOf(row))));
}

/** The pages to load again for events about these ids: the first, and those with such a row; `rest` is for later. */
export function pagesToAsk(data: InfiniteData<ListPage>, idOf: IdOf, ids: Happened): { pages: number[]; rest: string[] } {
  const pages = [0];
  const rest: string[] = [];
  data.pages.forEach((page, at) => {
    const changed = at === 0 ? [] : page.items.map(idOf).filter((id) => ids.has(id));
    if (changed.length === 0) return;
    if (pages.length < PAGES_AT_ONCE) pages.push(at);
    else rest.push(...changed);
  });
  return { pages, rest };
}

/** The pages that one turn of polling loads again: the first, and the others one after another, from page `from` on. */
export function pagesInTurn(count: number, from: number): { pages: number[]; next: number } {
  const others = Math.max(0, count - 1);
  const turns = Math.min(PAGES_AT_ONCE - 1, others);
  const at = (turn: number) => ((from - 1 + turn) % others) + 1;
  return { pages: [0, ...Array.from({ length: turns }, (_, turn) => at(turn))], next: others === 0 ? 1 : at(turns) };
}

/**
 * The list with these pages as they are now; null if more new rows have come than a page holds, so that nobody knows
 * which are missing between the fresh first page and what is loaded, or if the list would grow beyond its bound.
 *
 * A page begins behind its cursor whatever comes before it. New rows push others out of it: those become a page of their
 * own, which begins where the fresh page ends.
 */
export function withFreshPages(data: InfiniteData<ListPage>, idOf: IdOf, fresh: readonly { pageParam: unknown; page: ListPage }[]): InfiniteData<ListPage> | null {
  let merged: InfiniteData<ListPage> | null = data;
  for (const { pageParam, page } of fresh) {
    const at: number = merged.pageParams.indexOf(pageParam);
    if (at >= 0) merged = withPage(merged, at, idOf, page);
    if (merged === null) return null;
  }
  return { ...merged, pages: withoutRepeated(merged.pages, idOf) };
}

function withPage(data: InfiniteData<ListPage>, at: number, idOf: IdOf, fresh: ListPage): InfiniteData<ListPage> | null {
  const [before, old, later] = [data.pages.slice(0, at), data.pages[at] as ListPage, data.pages.slice(at + 1)];
  const [begin, params] = [data.pageParams.slice(0, at + 1), data.pageParams.slice(at + 1)];
  const second = later[0];
  if (fresh.next_cursor === null || second === undefined) return { pages: [...before, fresh], pageParams: begin };
  const ids = new Set(fresh.items.map(idOf));
  const shared = old.items.findLastIndex((row) => ids.has(idOf(row)));
  const isLater = (id: string) => later.some((page) => page.items.some((row) => idOf(row) === id));
  if (at === 0 && shared < 0 && ![...ids].some(isLater)) return null;
  // Rows that stood before one that is still there, and are not fresh, have left the list.
  const pushedOut = isLater([...ids].at(-1) ?? "") ? [] : old.items.slice(shared + 1);
  if (pushedOut.length === 0) return { pages: [...before, { ...fresh, next_cursor: old.next_cursor }, ...later], pageParams: data.pageParams };
  if (data.pages.reduce((sum, page) => sum + page.items.length, 0) > ROWS_MAX) return null;
  // Few rows are joined with those behind them, as far as one request for them gets them all.
  const joined = pushedOut.length + second.items.length <= fresh.items.length;
  const piece = joined ? { ...second, items: [...pushedOut, ...second.items] } : { ...fresh, items: pushedOut, next_cursor: old.next_cursor };
  return {
    pages: [...before, fresh, piece, ...(joined ? later.slice(1) : later)],
    pageParams: [...begin, fresh.next_cursor, ...(joined ? params.slice(1) : params)],
  };
}

/** Each row once, where it stands first. */
function withoutRepeated(pages: readonly ListPage[], idOf: IdOf): ListPage[] {
  const seen = new Set<string>();
  return pages.map((page) => {
    const items = page.items.filter((row) => !seen.has(idOf(row)) && seen.add(idOf(row)));
    return items.length === page.items.length ? page : { ...page, items };
  });
}
