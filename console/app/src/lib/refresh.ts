/**
 * Asks again for what events are about.
 *
 * What holds, however fast events come and however slow the gateway answers:
 * - a request that is under way is never cancelled by an event: its answer is shown;
 * - each query has at most one request of this kind under way, and at most one more waits for it;
 * - of a list whose rows have ids (`rowsBy`), only the first page and the pages with changed rows are asked for.
 */

import type { InfiniteData, Query, QueryClient, QueryKey } from "@tanstack/react-query";
import { PAGES_AT_ONCE, pagesToAsk, withFreshPages, type IdOf, type ListPage } from "./pages";

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
  /** The queries with a request under way, each with the ids of the events that came meanwhile, or null. */
  readonly #busy = new Map<string, Set<string> | null>();

  constructor(client: QueryClient, options: RefreshOptions) {
    this.#client = client;
    this.#options = options;
  }

  /** Ask for every query under this key that is on screen; the others are asked for when they are shown again. */
  refresh(key: QueryKey, ids: Iterable<string>): void {
    for (const query of this.#client.getQueryCache().findAll({ queryKey: key })) {
      if (query.isDisabled() || !query.isActive()) query.invalidate();
      else this.#ask(query as unknown as Query, new Set(ids));
    }
  }

  #ask(query: Query, ids: Set<string>): void {
    const waiting = this.#busy.get(query.queryHash);
    if (waiting !== undefined) {
      const all = waiting ?? new Set<string>();
      for (const id of ids) if (all.size < IDS_MAX) all.add(id);
      this.#busy.set(query.queryHash, all);
      return;
    }
    this.#busy.set(query.queryHash, null);
    void this.#once(query, ids).then((rest) => {
      const next = this.#busy.get(query.queryHash) ?? null;
      this.#busy.delete(query.queryHash);
      if ((next === null && rest.length === 0) || !query.isActive()) return;
      this.#ask(query, new Set([...rest, ...(next ?? [])]));
    });
  }

  /** One request, after the one that is under way. Resolves to the ids that are left for the next one; never rejects. */
  async #once(query: Query, ids: Set<string>): Promise<string[]> {
    try {
      if (query.state.fetchStatus !== "idle") await query.fetch(undefined, { cancelRefetch: false });
    } catch {
      // Whoever began that request learns of its failure; this one is asked for all the same.
    }
    const idOf = query.meta?.["idOf"] as IdOf | undefined;
    const before = query.state.data as InfiniteData<ListPage> | undefined;
    try {
      if (idOf !== undefined && before !== undefined) return await this.#pages(query, before, idOf, ids);
      await query.fetch(undefined, { cancelRefetch: false });
    } catch (error) {
      // A plain query reports its failure to the cache itself.
      if (idOf !== undefined) this.#options.onError(error);
    }
    return [];
  }

  async #pages(query: Query, before: InfiniteData<ListPage>, idOf: IdOf, ids: Set<string>): Promise<string[]> {
    const asked = pagesToAsk(before, idOf, ids);
    const load = query.options.queryFn as (context: object) => Promise<ListPage>;
    const stop = new AbortController();
    const fresh = await Promise.all(
      asked.pages.map(async (at) => {
        const pageParam = before.pageParams[at];
        const context = { client: this.#client, queryKey: query.queryKey, signal: stop.signal, pageParam, direction: "forward", meta: query.meta };
        return { pageParam, page: await load(context) };
      }),
    );
    this.#options.onAnswer();
    // The next page may have been asked for meanwhile: its answer is made of the pages of before, so it comes first.
    if (query.state.fetchStatus !== "idle") await query.fetch(undefined, { cancelRefetch: false }).catch(() => undefined);
    const now = query.state.data as InfiniteData<ListPage> | undefined;
    if (now === undefined) return [];
    const merged = withFreshPages(now, idOf, fresh);
    if (merged !== null) query.setData(merged);
    else if (now.pages.length > PAGES_AT_ONCE) this.#options.onGap(query.queryHash);
    else await query.fetch(undefined, { cancelRefetch: false });
    return asked.rest;
  }
}
