/**
 * Asks again for what events are about.
 *
 * What holds, however fast events come and however slow the gateway answers:
 * - a request that is under way is never cancelled by an event: its answer is shown;
 * - each query has at most one request of this kind under way, and at most one more waits for it;
 * - of a list whose rows have ids (`rowsBy`), only the first page and the pages with changed rows are asked for. Where a
 *   new row may stand anywhere, the other pages are asked for in turn;
 * - polling asks for the first page of such a list and for the others in turn;
 * - no event and no turn of polling asks for more than `PAGES_AT_ONCE` pages of a list.
 */

import type { InfiniteData, Query, QueryClient, QueryKey } from "@tanstack/react-query";
import { concerns, PAGES_AT_ONCE, pagesInTurn, pagesToAsk, withFreshPages, type Happened, type ListPage, type RowsMeta } from "./pages";

export interface RefreshOptions {
  /** A page of a list was answered outside of the cache's own requests. */
  onAnswer: () => void;
  onError: (error: unknown) => void;
  /** A list has grown by more than a page since it was loaded: a person decides when to load it anew. */
  onGap: (queryHash: string) => void;
}

/** Ids that wait for the request under way; beyond this number only the first page is asked for. */
const IDS_MAX = 5_000;

export class Refresher {
  readonly #client: QueryClient;
  readonly #options: RefreshOptions;
  /** The queries with a request under way, each with what happened meanwhile, or null. */
  readonly #busy = new Map<string, Map<string, string | undefined> | null>();
  /** The page of each list that is asked for next in turn, beside the first. */
  readonly #next = new WeakMap<Query, number>();

  constructor(client: QueryClient, options: RefreshOptions) {
    this.#client = client;
    this.#options = options;
  }

  /** Ask for every query under this key that is on screen; the others are asked for when they are shown again. */
  refresh(key: QueryKey, happened: Happened): void {
    for (const found of this.#client.getQueryCache().findAll({ queryKey: key })) {
      const query = found as unknown as Query;
      if (query.isDisabled() || !query.isActive()) query.invalidate();
      else if (isConcerned(query, happened)) this.#ask(query, happened);
    }
  }

  /** Ask for the lists on screen whose rows have ids: for all of them, or for those whose rows move. */
  poll(which: "all" | "moving"): void {
    for (const found of this.#client.getQueryCache().findAll({ type: "active" })) {
      const query = found as unknown as Query;
      const meta = rowsOf(query);
      if (meta === undefined || query.isDisabled() || (which === "moving" && !meta.moves)) continue;
      if (!this.#busy.has(query.queryHash)) this.#ask(query, null);
    }
  }

  /** Ask for what happened, or with null for the pages whose turn it is. */
  #ask(query: Query, happened: Happened | null): void {
    const waiting = this.#busy.get(query.queryHash);
    if (waiting !== undefined) {
      const all = waiting ?? new Map<string, string | undefined>();
      for (const [id, state] of happened ?? []) if (all.size < IDS_MAX || all.has(id)) all.set(id, state);
      this.#busy.set(query.queryHash, all);
      return;
    }
    this.#busy.set(query.queryHash, null);
    void this.#once(query, happened).then((rest) => {
      const next = this.#busy.get(query.queryHash) ?? null;
      this.#busy.delete(query.queryHash);
      if ((next === null && rest.length === 0) || !query.isActive()) return;
      this.#ask(query, new Map([...rest.map((id) => [id, undefined] as const), ...(next ?? [])]));
    });
  }

  /** One request, after the one that is under way. Resolves to the ids that are left for the next one; never rejects. */
  async #once(query: Query, happened: Happened | null): Promise<string[]> {
    try {
      if (query.state.fetchStatus !== "idle") await query.fetch(undefined, { cancelRefetch: false });
    } catch {
      // Whoever began that request learns of its failure; this one is asked for all the same.
    }
    const meta = rowsOf(query);
    const before = query.state.data as InfiniteData<ListPage> | undefined;
    try {
      if (meta !== undefined && before !== undefined) return await this.#pages(query, before, meta, happened);
      await query.fetch(undefined, { cancelRefetch: false });
    } catch (error) {
      // A plain query reports its failure to the cache itself.
      if (meta !== undefined) this.#options.onError(error);
    }
    return [];
  }

  #choose(query: Query, before: InfiniteData<ListPage>, meta: RowsMeta, happened: Happened | null): { pages: number[]; rest: string[] } {
    const asked = happened === null ? { pages: [0], rest: [] } : pagesToAsk(before, meta.idOf, happened);
    if (happened !== null && meta.entersAs === undefined) return asked;
    const turn = pagesInTurn(before.pages.length, this.#next.get(query) ?? 1);
    this.#next.set(query, turn.next);
    return { ...asked, pages: [...new Set([...asked.pages, ...turn.pages])].slice(0, PAGES_AT_ONCE) };
  }

  async #pages(query: Query, before: InfiniteData<ListPage>, meta: RowsMeta, happened: Happened | null): Promise<string[]> {
    const asked = this.#choose(query, before, meta, happened);
    const load = query.options.queryFn as (context: object) => Promise<ListPage>;
    const stop = new AbortController();
    const fresh = await Promise.all(
      asked.pages.map(async (at) => {
        const pageParam = before.pageParams[at];
        const context = { client: this.#client, queryKey: query.queryKey, signal: stop.signal, pageParam, direction: "forward", meta };
        return { pageParam, page: await load(context) };
      }),
    );
    this.#options.onAnswer();
    // The next page may have been asked for meanwhile: its answer is made of the pages of before, so it comes first.
    if (query.state.fetchStatus !== "idle") await query.fetch(undefined, { cancelRefetch: false }).catch(() => undefined);
    const now = query.state.data as InfiniteData<ListPage> | undefined;
    if (now === undefined) return [];
    const merged = withFreshPages(now, meta.idOf, fresh);
    if (merged !== null) query.setData(merged);
    else if (now.pages.length > PAGES_AT_ONCE) this.#options.onGap(query.queryHash);
    else await query.fetch(undefined, { cancelRefetch: false });
    return asked.rest;
  }
}

function rowsOf(query: Query): RowsMeta | undefined {
  return query.meta?.["idOf"] === undefined ? undefined : (query.meta as RowsMeta);
}

function isConcerned(query: Query, happened: Happened): boolean {
  const [meta, data] = [rowsOf(query), query.state.data as InfiniteData<ListPage> | undefined];
  return meta === undefined || data === undefined || concerns(data, meta, happened);
}
