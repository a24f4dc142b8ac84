/** Follows the gateway's live events. Each event arrives once and in order, however often the connection breaks. */

import type { TrellisClient } from "./client.js";
import { ProblemError, type ProblemDocument } from "./problem.js";
import { SseParser } from "./sse.js";

export interface LiveEvent {
  /** The position of the event: the stream goes on behind it. */
  id: string;
  type: string;
  runId?: string;
  proposalId?: string;
  jobId?: string;
  artifactId?: string;
  lifecycle?: string;
  status?: string;
  step?: number;
  agentSlug?: string;
  [name: string]: unknown;
}

export interface FollowOptions {
  /** Go on behind this position; without it the stream begins now. */
  after?: string | null;
  query?: Record<string, string | string[]>;
  signal: AbortSignal;
  onEvent: (event: LiveEvent) => void;
  /** `open` once the gateway answers with a stream; `broken` when it does not, or when the stream has ended. */
  onState?: (state: "open" | "broken", status: number | null) => void;
  /** Waits between connections; replaced by tests. */
  wait?: (milliseconds: number, signal: AbortSignal) => Promise<void>;
}

const RETRY_MS = 2_000;
const RETRY_MS_MAX = 30_000;
/** A gateway sends a keep-alive every 15 seconds: a stream that is silent for longer is dead. */
const SILENT_MS_MAX = 45_000;

/**
 * Follow events until the signal aborts. Resolves to the last position; ends early only if the token is refused. Rejects with a
 * `ProblemError` if the gateway refuses the query: asking again would not help.
 */
export async function follow(client: TrellisClient, options: FollowOptions): Promise<string | null> {
  let position = options.after ?? null;
  let retry = RETRY_MS;
  let failures = 0;
  const wait = options.wait ?? pause;
  while (!options.signal.aborted) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    options.signal.addEventListener("abort", stop, { once: true });
    let silent = setTimeout(stop, SILENT_MS_MAX);
    let status: number | null = null;
    let refusal: ProblemError | null = null;
    try {
      const headers: Record<string, string> = { Accept: "text/event-stream", ...client.headers() };
      if (position !== null) headers["Last-Event-ID"] = position;
      const response = await client.fetch(client.address("/events/stream", {}, options.query ?? {}), {
        headers,
        signal: attempt.signal,
        cache: "no-store",
        credentials: "omit",
      });
      status = response.status;
      if (response.ok && response.body !== null) {
        failures = 0;
        options.onState?.("open", status);
        const parser = new SseParser(
          {
            onEvent: (event) => {
              position = event.id ?? position;
              options.onEvent({ ...(JSON.parse(event.data) as LiveEvent), id: position ?? "" });
            },
            onPosition: (id) => (position = id),
            onRetry: (ms) => (retry = ms),
          },
          position,
        );
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
          clearTimeout(silent);
          silent = setTimeout(stop, SILENT_MS_MAX);
          parser.push(piece.value);
        }
      } else if (status === 422) {
        // With a position, the ledger behind the address may be another one. Without, the query is wrong.
        if (position === null) refusal = new ProblemError(status, (await response.json().catch(() => ({}))) as ProblemDocument);
        position = null;
      }
    } catch {
      // The connection broke or never came about: the next one goes on behind `position`.
    } finally {
      clearTimeout(silent);
      options.signal.removeEventListener("abort", stop);
    }
    if (options.signal.aborted) break;
    options.onState?.("broken", status);
    if (refusal !== null) throw refusal;
    if (status === 401 || status === 403) break;
    await wait(Math.min(retry * 2 ** Math.min(failures, 5), RETRY_MS_MAX), options.signal);
    failures += 1;
  }
  return position;
}

function pause(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
