/** Keeps what is shown current: one stream of events per tab, polling while there is none, nothing while hidden. */

import { QueryCache, QueryClient, useQuery, type QueryKey } from "@tanstack/react-query";
import { follow, GatewayUnreachable, ProblemError, type LiveEvent } from "@trellis/client";
import { api, hasEnded } from "./api";
import { toast } from "./components/parts";
import { session, signOut } from "./session";
import { Store } from "./store";
import { text } from "./texts";

export type LiveMode = "connecting" | "live" | "polling" | "paused" | "offline";

export const mode = new Store<LiveMode>("connecting");
/** When the gateway last answered, in milliseconds since the epoch. */
export const lastKnown = new Store<number>(Date.now());
/** Counts changes of each kind of thing, for lists that are too long to load again by themselves. */
export const changes = new Store<Record<string, number>>({});

export const POLL_MS = 5_000;
export const POLL_SLOW_MS = 30_000;
const GATHER_MS = 400;

export const queries: QueryClient = new QueryClient({
  queryCache: new QueryCache({
    onSuccess: () => answered(),
    onError: (error) => failed(error),
  }),
  defaultOptions: {
    queries: {
      staleTime: 2_000,
      gcTime: 10 * 60_000,
      refetchOnWindowFocus: true,
      networkMode: "always",
      retry: (count, error) => !(error instanceof ProblemError && error.status < 500) && count < 1,
    },
    mutations: { networkMode: "always" },
  },
});

/** How often a query asks by itself: not while events come or nobody looks, every 5 s for what moves, else every 30 s. */
export function interval(moves: boolean): number | false {
  if (mode.value === "live" || mode.value === "paused") return false;
  return moves ? POLL_MS : POLL_SLOW_MS;
}

/** Worker processes; heartbeats are no events, so they are asked for. */
export function useWorkers() {
  return useQuery({ queryKey: ["workers"], queryFn: ({ signal }) => api.get("/workers", { signal }), refetchInterval: POLL_MS });
}

/** The depth of each job type, asked for often: a count is no event either. */
export function useQueues() {
  return useQuery({ queryKey: ["queues"], queryFn: ({ signal }) => api.get("/queues", { signal }), refetchInterval: POLL_MS });
}

// A query computes its interval when it is drawn or answered. A stream that breaks does neither, so it is done here.
mode.subscribe(() => {
  for (const query of queries.getQueryCache().findAll({ type: "active" })) {
    for (const observer of query.observers) observer.setOptions(observer.options);
  }
});

function answered(): void {
  lastKnown.set(Date.now());
  if (mode.value === "offline") mode.set("polling");
}

export function failed(error: unknown): void {
  if (error instanceof GatewayUnreachable) mode.set("offline");
  if (error instanceof ProblemError && error.status === 401 && session.value !== null) {
    queries.clear();
    signOut(text("signin.refused", { why: error.detail }));
  }
}

/** Follow events while signed in. Returns what ends it. */
export function start(): () => void {
  let stop = new AbortController();
  let position: string | null = null;

  const connect = () => {
    stop.abort();
    stop = new AbortController();
    const mine = stop;
    if (mode.value !== "offline") mode.set("connecting");
    let wasBroken = false;
    void follow(api, {
      after: position,
      signal: mine.signal,
      onEvent: (event) => {
        position = event.id;
        gather(event);
        if (event.type === "run.status.changed" && hasEnded("run", event.status)) runEnded(event.runId ?? "", event.status ?? "");
      },
      onState: (state, status) => {
        if (state === "open") {
          mode.set("live");
          lastKnown.set(Date.now());
          // What happened before the first position is in no event, and a gateway may have come back: ask for all once.
          if (position === null || wasBroken) void queries.invalidateQueries();
          return;
        }
        wasBroken = true;
        mode.set(status === null ? "offline" : "polling");
      },
    }).then((last) => {
      position = last ?? position;
    });
  };
  const visible = () => {
    if (document.hidden) {
      stop.abort();
      mode.set("paused");
    } else if (stop.signal.aborted) connect();
  };
  document.addEventListener("visibilitychange", visible);
  if (document.hidden) {
    stop.abort();
    mode.set("paused");
  } else connect();
  return () => {
    document.removeEventListener("visibilitychange", visible);
    stop.abort();
  };
}

/** Tell once that a run has ended. */
export function runEnded(runId: string, status: string): void {
  toast(text("run.ended", { id: runId, status }), `run-ended-${runId}`);
}

const waiting = new Map<string, QueryKey>();
let timer: ReturnType<typeof setTimeout> | null = null;

/** Events that arrive together cause one request for each thing they are about. */
function gather(event: LiveEvent): void {
  for (const key of keysOf(event)) waiting.set(JSON.stringify(key), key);
  timer ??= setTimeout(() => {
    timer = null;
    const keys = [...waiting.values()];
    waiting.clear();
    const counted = { ...changes.value };
    for (const key of keys) {
      if (key.length === 1) counted[String(key[0])] = (counted[String(key[0])] ?? 0) + 1;
      void queries.invalidateQueries({ queryKey: key });
    }
    changes.set(counted);
  }, GATHER_MS);
}

export function keysOf(event: LiveEvent): QueryKey[] {
  if (event.runId !== undefined) return [["runs"], ["run", event.runId]];
  if (event.proposalId !== undefined) return [["proposals"], ["proposal", event.proposalId]];
  if (event.artifactId !== undefined) return [["artifacts"]];
  if (event.jobId !== undefined) return [["jobs"], ["job", event.jobId], ["dead-letters"]];
  return [];
}
