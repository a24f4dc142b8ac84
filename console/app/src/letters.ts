/** The dead letters of the gateway: a list that is loaded page by page to its end or its bound, and what is in it. */

import { infiniteQueryOptions, useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { useEffect } from "react";
import { api, type DeadLetter } from "./api";
import type { LetterFilter } from "./lib/letters";
import { allPages, rowsBy } from "./lib/pages";

export const LETTERS_PAGE = 200;
export const LETTERS_MAX = 5_000;
const PAGES_MAX = 50;
/** A job that comes into one of these states may be a new dead letter, wherever its place in the list is. */
const DEAD = new Set(["dead_lettered", "DEAD"]);

export function lettersQuery(filter: LetterFilter) {
  return infiniteQueryOptions({
    queryKey: ["dead-letters", "list", filter],
    meta: { ...rowsBy("job_id", false), entersAs: DEAD },
    queryFn: ({ pageParam, signal }) => lettersPage(filter, pageParam, signal),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor,
  });
}

/** The letters that the gateway selects. `isWhole` says that all of them are loaded, `isBounded` that it ends before the last. */
export function useLetters(filter: LetterFilter, enabled: boolean) {
  const listing = useInfiniteQuery({ ...lettersQuery(filter), placeholderData: (before) => before, enabled });
  const pages = listing.data?.pages ?? [];
  const items: DeadLetter[] = pages.flatMap((page) => page.items);
  const isBounded = listing.hasNextPage && (items.length >= LETTERS_MAX || pages.length >= PAGES_MAX);
  const { hasNextPage, isFetching, isFetchNextPageError, isPlaceholderData, fetchNextPage } = listing;
  useEffect(() => {
    if (hasNextPage && !isBounded && !isFetching && !isFetchNextPageError && !isPlaceholderData) void fetchNextPage();
  }, [hasNextPage, isBounded, isFetching, isFetchNextPageError, isPlaceholderData, fetchNextPage]);
  return { listing, items, isBounded, isWhole: listing.isSuccess && !hasNextPage && !isPlaceholderData };
}

/** Whether letters have just this type. The list of queues may be older than a type, so the gateway is asked for it by name. */
export function useIsTypeOfLetters(type: string | undefined) {
  return useQuery({
    queryKey: ["dead-letters", "of type", type],
    queryFn: async ({ signal }) => (await allLetters({ type: type ?? "" }, 1, signal)).items.length > 0,
    enabled: type !== undefined,
  });
}

/** The newest letters that the gateway selects, up to `most`; `bounded` if there are more. */
export function allLetters(filter: LetterFilter, most: number, signal: AbortSignal): Promise<{ items: DeadLetter[]; bounded: boolean }> {
  return allPages((cursor) => lettersPage(filter, cursor, signal, Math.min(most, LETTERS_PAGE)), most);
}

function lettersPage(filter: LetterFilter, cursor: string | null, signal: AbortSignal, limit = LETTERS_PAGE) {
  return api.get("/dlq", { query: { limit, cursor, ...(filter as object) }, signal });
}
