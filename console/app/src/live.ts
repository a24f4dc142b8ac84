/** Keeps what is shown current: one stream of events per tab, polling while there is none, nothing while hidden. */

import { hashKey, QueryCache, QueryClient, useQuery, type QueryKey } from "@tanstack/react-query";
import { follow, GatewayUnreachable, ProblemError, type LiveEvent } from "@trellis/client";
import { api, hasEnded } from "./api";
import { clearToasts, toast } from "./components/parts";
import { allPages } from "./lib/pages";
import { Refresher } from "./lib/refresh";
import { language } from "./preferences";
import { session, signOut } from "./session";
import { Store } from "./store";
import { text } from "./texts";
import { statusText } from "./texts-statuses";

export type LiveMode = "connecting" | "live" | "polling" | "paused" | "offline";

export const mode = new Store<LiveMode>("connecting");
/** When the gateway last answered, in milliseconds since the epoch. */
export const lastKnown = new Store<number>(Date.now());
/** Counts changes of each kind of thing, for screens that read a feed by themselves. */
export const changes = new Store<Record<string, number>>({});
/** The lists, by the hash of their query, that have grown by more than a page since they were loaded. */
export const gaps = new Store<ReadonlySet<string>>(new Set());

export const POLL_MS = 5_000;
export const POLL_SLOW_MS = 30_000;
const GATHER_MS = 400;
/** The largest page that the gateway gives. */
export const PAGE_MAX = 200;
const AGENTS_MAX = 2_000;

export const queries: QueryClient = new QueryClient({
  queryCache: new QueryCache({
    onSuccess: (data, query) => {
      answered();
      if (query.queryKey[0] === "run" && query.queryKey.length === 2) runAnswered(String(query.queryKey[1]), data as { status?: string });
    },
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

const refresher = new Refresher(queries, {
  onAnswer: answered,
  onError: failed,
  onGap: (hash) => gaps.set(new Set([...gaps.value, hash])),
});

/** Load a list from its beginning. */
export function startAnew(queryKey: QueryKey): void {
  gaps.set(new Set([...gaps.value].filter((one) => one !== hashKey(queryKey))));
  void queries.resetQueries({ queryKey, exact: true });
}

/**
 * How often a query asks by itself: not while events come or nobody looks, every 5 s for what moves, else every 30 s.
 * Lists that are loaded page by page are asked for by `poll` instead.
 */
export function interval(moves: boolean): number | false {
  if (mode.value === "live" || mode.value === "paused") return false;
  return moves ? POLL_MS : POLL_SLOW_MS;
}

/** Ask for the lists on screen as often as `interval` says, a few pages of each at a time. Returns what ends it. */
export function poll(): () => void {
  let turn = 0;
  const timer = setInterval(() => {
    turn += 1;
    if (interval(true) === false) return;
    refresher.poll(turn % (POLL_SLOW_MS / POLL_MS) === 0 ? "all" : "moving");
  }, POLL_MS);
  return () => clearInterval(timer);
}

/** Worker processes; heartbeats are no events, so they are asked for. */
export function useWorkers() {
  return useQuery({ queryKey: ["workers"], queryFn: ({ signal }) => api.get("/workers", { signal }), refetchInterval: POLL_MS });
}

/** Every agent, for choices and completion. */
export function useAgents() {
  return useQuery({ queryKey: ["agents", "all"], queryFn: ({ signal }) => allAgents(signal), staleTime: 60_000, retry: false });
}

/** An agent of this instance, for commands that are suggested: the first that may run. */
export function useSomeAgent(): string {
  const agents = useAgents().data?.items ?? [];
  return (agents.find((one) => one.status === "active") ?? agents[0])?.slug ?? "AGENT";
}

export function allAgents(signal: AbortSignal) {
  return allPages((cursor) => api.get("/agents", { query: { limit: PAGE_MAX, cursor }, signal }), AGENTS_MAX);
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
    endSession(text("signin.refused", { why: error.detail }));
  }
}

/** Sign out. Nothing that the person has seen stays for whoever signs in next. */
export function endSession(reason: string | null = null): void {
  queries.clear();
  clearToasts();
  gaps.set(new Set());
  openRuns.clear();
  signOut(reason);
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
    }, failed);
  };
  const visible = () => {
    if (document.hidden) {
      stop.abort();
      mode.set("paused");
    } else if (stop.signal.aborted) connect();
  };
  document.addEventListener("visibilitychange", visible);
  const stopPolling = poll();
  if (document.hidden) {
    stop.abort();
    mode.set("paused");
  } else connect();
  return () => {
    document.removeEventListener("visibilitychange", visible);
    stopPolling();
    stop.abort();
  };
}

const openRuns = new Set<string>();
const OPEN_RUNS_MAX = 1_000;

/** Tell of a run that was open when it was answered before, and has ended now: without a stream, no event says so. */
function runAnswered(runId: string, { status }: { status?: string }): void {
  if (!hasEnded("run", status)) {
    if (openRuns.size >= OPEN_RUNS_MAX) openRuns.clear();
    openRuns.add(runId);
  } else if (openRuns.delete(runId)) runEnded(runId, status ?? "");
}

/** Tell once that a run has ended. */
export function runEnded(runId: string, status: string): void {
  toast(text("run.ended", { id: runId, status: statusText(language.value, status) }), `run-ended-${runId}`);
}

const waiting = new Map<string, { key: QueryKey; happened: Map<string, string | undefined> }>();
let timer: ReturnType<typeof setTimeout> | null = null;

/** Events that arrive together cause one request for each thing they are about. */
export function gather(event: LiveEvent): void {
  const id = event.runId ?? event.proposalId ?? event.artifactId ?? event.jobId ?? "";
  for (const key of keysOf(event)) {
    const name = JSON.stringify(key);
    const one = waiting.get(name) ?? { key, happened: new Map<string, string | undefined>() };
    one.happened.set(id, event.status);
    waiting.set(name, one);
  }
  timer ??= setTimeout(() => {
    timer = null;
    const gathered = [...waiting.values()];
    waiting.clear();
    const counted = { ...changes.value };
    for (const { key, happened } of gathered) {
      if (key.length === 1) counted[String(key[0])] = (counted[String(key[0])] ?? 0) + 1;
      refresher.refresh(key, happened);
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
