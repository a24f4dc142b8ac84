/** What a run or a job recorded, as lines in the order of time: its events, its steps with their calls, its log lines. */

import { callsOf } from "./timeline";

export interface LoggedEvent {
  type: string;
  ts: string;
  actor: string;
  cause: string | null;
  payload: { [name: string]: unknown };
}

export interface LoggedStep {
  step: number;
  name: string;
  started_at: string;
  finished_at: string;
}

/** A log line of a handler, or a sign of progress. */
export interface LoggedSignal {
  ts: string;
  type: string;
  data?: unknown;
}

export interface LogLine {
  ts: string;
  source: "event" | "step" | "log";
  text: string;
}

export function logOf(events: readonly LoggedEvent[], steps: readonly LoggedStep[], signals: readonly LoggedSignal[]): LogLine[] {
  const lines = [...events.map(eventLine), ...steps.flatMap(stepLines), ...signals.map(signalLine)];
  // The sort is stable: lines of one moment stay in the order of their source.
  return lines.sort((a, b) => Date.parse(a.ts) - Date.parse(b.ts));
}

/** The log as a text file. */
export function plainText(lines: readonly LogLine[]): string {
  return lines.map((line) => `${line.ts} ${line.source.padEnd(5)} ${line.text}\n`).join("");
}

function eventLine(event: LoggedEvent): LogLine {
  const { from, to } = event.payload;
  const change = from === to || to == null ? "" : ` ${String(from ?? "·")} → ${String(to)}`;
  const data = event.payload["data"];
  const about = typeof data === "object" && data !== null && Object.keys(data).length > 0 ? ` ${JSON.stringify(data)}` : "";
  return { ts: event.ts, source: "event", text: oneLine(`${event.type}${change} by ${event.actor}${event.cause === null ? "" : `: ${event.cause}`}${about}`) };
}

/** A step begins, and ends with the calls that it made: when each of them began is not recorded. */
function stepLines(step: LoggedStep): LogLine[] {
  const name = `${step.name} (step ${step.step})`;
  const calls = callsOf(step).map((call) => ({ ts: step.finished_at, source: "step" as const, text: oneLine(`${name}: ${call.kind} ${call.name} ${call.outcome} in ${call.ms} ms`) }));
  return [{ ts: step.started_at, source: "step", text: `${name} began` }, ...calls, { ts: step.finished_at, source: "step", text: `${name} ended` }];
}

function signalLine(signal: LoggedSignal): LogLine {
  const data = typeof signal.data === "object" && signal.data !== null ? (signal.data as Record<string, unknown>) : {};
  if (signal.type !== "job_log" || typeof data["event"] !== "string") {
    return { ts: signal.ts, source: "log", text: oneLine(`${signal.type} ${signal.data == null ? "" : JSON.stringify(signal.data)}`.trim()) };
  }
  const fields = data["fields"];
  const more = typeof fields === "object" && fields !== null && Object.keys(fields).length > 0 ? ` ${JSON.stringify(fields)}` : "";
  return { ts: signal.ts, source: "log", text: oneLine(`${String(data["level"] ?? "info")}: ${data["event"]}${more}`) };
}

/** A text of several lines as one, so that no text can look like another line of the log. */
function oneLine(text: string): string {
  return text.replace(/[\r\n\u2028\u2029]+/g, " ⏎ ");
}
