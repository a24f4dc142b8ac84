/** A list that is loaded page by page, newest first, and the parts of it that are loaded again. */

import type { InfiniteData } from "@tanstack/react-query";

export interface ListPage {
  items: object[];
  next_cursor: string | null;
}

/** How many pages one event, or events that come together, cause to be loaded again. */
export const PAGES_AT_ONCE = 3;
/** A page may be short although more follow: so many are asked for at most. */
const PAGES_MAX = 500;
/** A first page that has grown beyond this is loaded anew instead. */
const FIRST_PAGE_MAX = 1_000;
/** The id of a row, which has another name in each list. */
export type IdOf = (row: object) => string;

/** For the `meta` of a list whose pages may be loaded again one by one. */
export function rowsBy(name: string): { idOf: IdOf } {
  return { idOf: (row) => String((row as Record<string, unknown>)[name] ?? "") };
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

/** The pages to load again for events about these ids: the first, and those with such a row; `rest` is for later. */
export function pagesToAsk(data: InfiniteData<ListPage>, idOf: IdOf, ids: ReadonlySet<string>): { pages: number[]; rest: string[] } {
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

/**
 * The list with these pages as they are now; null if more new rows have come than a page holds, so that nobody knows
 * which are missing between the fresh first page and what is loaded.
 *
 * A page begins behind its cursor whatever comes before it, so a later page is exchanged. The first one has moved: the
 * rows that new ones pushed out of it stay, until the second page begins.
 */
export function withFreshPages(data: InfiniteData<ListPage>, idOf: IdOf, fresh: readonly { pageParam: unknown; page: ListPage }[]): InfiniteData<ListPage> | null {
  const pages = [...data.pages];
  for (const { pageParam, page } of fresh) {
    const at = data.pageParams.indexOf(pageParam);
    const old = pages[at];
    if (old === undefined) continue;
    const isLast = at === pages.length - 1;
    if (at > 0 || isLast) {
      pages[at] = isLast ? page : { ...page, next_cursor: old.next_cursor };
      continue;
    }
    if (page.next_cursor === null) return { pages: [page], pageParams: data.pageParams.slice(0, 1) };
    const first = withoutGap(pages, idOf, page);
    if (first === null) return null;
    pages[0] = first;
  }
  return { ...data, pages: withoutRepeated(pages, idOf) };
}

function withoutGap(pages: readonly ListPage[], idOf: IdOf, fresh: ListPage): ListPage | null {
  const old = pages[0] as ListPage;
  const ids = new Set(fresh.items.map(idOf));
  const shared = old.items.findLastIndex((row) => ids.has(idOf(row)));
  if (shared < 0 && !pages.slice(1).some((page) => page.items.some((row) => ids.has(idOf(row))))) return null;
  // Rows of the old first page that stood before a row that is still there, and are not fresh, have left the list.
  const pushedOut = shared < 0 ? [] : old.items.slice(shared + 1);
  const items = [...fresh.items, ...pushedOut];
  return items.length > FIRST_PAGE_MAX ? null : { ...fresh, items, next_cursor: old.next_cursor };
}

/** Each row once, where it stands first. */
function withoutRepeated(pages: readonly ListPage[], idOf: IdOf): ListPage[] {
  const seen = new Set<string>();
  return pages.map((page) => {
    const items = page.items.filter((row) => !seen.has(idOf(row)) && seen.add(idOf(row)));
    return items.length === page.items.length ? page : { ...page, items };
  });
}
