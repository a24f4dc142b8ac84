/** A run or a job as bars of time: what it waited, when it ran, when it backed off, and its steps. */

export interface TimedEvent {
  type: string;
  ts: string;
  payload: { [name: string]: unknown };
}

export interface TimedStep {
  name: string;
  started_at: string;
  finished_at: string;
}

export type BarKind = "wait" | "run" | "backoff" | "step";

export interface Bar {
  kind: BarKind;
  label: string;
  /** Milliseconds since the epoch. */
  from: number;
  to: number;
  /** It has not ended: drawn up to now. */
  open: boolean;
}

/** A call that a step made: to a model, a tool, the NLM, the memory or a store. */
export interface StepCall {
  name: string;
  kind: string;
  outcome: string;
  ms: number;
}

export interface CallBar extends StepCall {
  from: number;
  to: number;
}

export interface TimelineRow {
  label: string;
  bars: Bar[];
  /** The calls of a step. */
  calls?: CallBar[];
}

export interface Timeline {
  from: number;
  to: number;
  rows: TimelineRow[];
}

/** States in which work is under way, in the words of every lifecycle that is drawn. */
const RUNNING = new Set(["running", "RUNNING", "CONTEXT_ASSEMBLY", "NOTEBOOKLM_CALL", "ARTIFACT_WRITE"]);

/** `ended` says whether the last status is final: otherwise the last bar is open, up to `now`. */
export function timelineOf(events: readonly TimedEvent[], steps: readonly TimedStep[], now: number, ended: boolean): Timeline {
  const rows = attempts(events, now, ended);
  for (const step of steps) {
    const from = Date.parse(step.started_at);
    const to = Date.parse(step.finished_at);
    if (Number.isNaN(from) || Number.isNaN(to)) continue;
    rows.push({ label: step.name, bars: [{ kind: "step", label: step.name, from, to, open: false }], calls: callBars(step, from, to) });
  }
  const bars = rows.flatMap((row) => row.bars);
  const from = bars.length === 0 ? now : Math.min(...bars.map((bar) => bar.from));
  const to = bars.length === 0 ? now : Math.max(...bars.map((bar) => bar.to));
  return { from, to: Math.max(to, from + 1), rows };
}

/** One row for each attempt: the wait before it and the time it ran. The wait after a failed attempt is backoff. */
function attempts(events: readonly TimedEvent[], now: number, ended: boolean): TimelineRow[] {
  const rows: TimelineRow[] = [];
  const changes = events.filter((event) => event.payload["to"] !== event.payload["from"]);
  let row: TimelineRow | null = null;
  changes.forEach((event, at) => {
    const next = changes[at + 1];
    const isLast = next === undefined;
    const from = Date.parse(event.ts);
    const status = String(event.payload["to"] ?? "");
    if (isLast && ended) return;
    const to = isLast ? Math.max(now, from) : Date.parse(next.ts);
    const runs = RUNNING.has(status);
    const before = row?.bars.at(-1);
    if (row === null || (!runs && before?.kind === "run")) {
      const retry = row !== null;
      row = { label: `#${rows.length + 1}`, bars: [] };
      rows.push(row);
      row.bars.push({ kind: runs ? "run" : retry ? "backoff" : "wait", label: status, from, to, open: isLast });
      return;
    }
    const kind: BarKind = runs ? "run" : (before?.kind ?? "wait");
    if (before !== undefined && before.kind === kind) {
      before.to = to;
      before.open = isLast;
      if (runs) before.label = status;
    } else row.bars.push({ kind, label: status, from, to, open: isLast });
  });
  return rows;
}

/** The calls that the file of a step lists, whatever else it holds. */
export function callsOf(step: object): StepCall[] {
  const listed = (step as { calls?: unknown }).calls;
  if (!Array.isArray(listed)) return [];
  return listed.map((one: Record<string, unknown>) => ({
    name: String(one["name"] ?? ""),
    kind: String(one["kind"] ?? ""),
    outcome: String(one["outcome"] ?? ""),
    ms: Number(one["duration_ms"]) || 0,
  }));
}

/**
 * Calls one behind the other from the start of their step: their order and durations are known, not when each began.
 * Calls that together took longer than the step ran at the same time; they are drawn shorter, so that they fit.
 */
export function callBars(step: object, from: number, to: number): CallBar[] {
  const calls = callsOf(step);
  const sum = calls.reduce((all, one) => all + one.ms, 0);
  const scale = sum > to - from && sum > 0 ? (to - from) / sum : 1;
  let at = from;
  return calls.map((one) => {
    const begin = at;
    at += one.ms * scale;
    return { ...one, from: begin, to: at };
  });
}
