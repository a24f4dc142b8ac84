/** Dead letters: grouped by what went wrong, and requeued, by a filter that the gateway evaluates. */

import type { Filter } from "./filter";

export interface Letter {
  job_id: string;
  type: string;
  lifecycle: string;
  reason_code: string;
  last_error: string;
  at: string;
}

export interface LetterGroup<T extends Letter> {
  key: string;
  type: string;
  reason_code: string;
  /** The error without what differs from job to job. */
  error: string;
  letters: T[];
}

const ERROR_CHARS_MAX = 300;

/** An error without ids, numbers, addresses and quoted values, so that equal causes read alike. */
export function fingerprint(error: string): string {
  return error
    .slice(0, ERROR_CHARS_MAX)
    .replace(/\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b/gi, "…")
    .replace(/\b0x[0-9a-f]+\b/gi, "…")
    .replace(/\b[0-9a-f]{16,}\b/gi, "…")
    .replace(/'[^']*'|"[^"]*"/g, "…")
    .replace(/\d+(?:\.\d+)*/g, "…");
}

/** Groups, the largest first. */
export function grouped<T extends Letter>(letters: readonly T[]): LetterGroup<T>[] {
  const groups = new Map<string, LetterGroup<T>>();
  for (const letter of letters) {
    const error = fingerprint(letter.last_error);
    const key = [letter.type, letter.reason_code, error].join("\n");
    const group = groups.get(key) ?? { key, type: letter.type, reason_code: letter.reason_code, error, letters: [] };
    group.letters.push(letter);
    groups.set(key, group);
  }
  return [...groups.values()].sort((a, b) => b.letters.length - a.letters.length || a.key.localeCompare(b.key));
}

/** What the gateway can select dead letters by. */
export interface LetterFilter {
  type?: string;
  reason_code?: string;
  lifecycle?: string;
}

const OF_GATEWAY: Record<string, keyof LetterFilter> = { type: "type", reason: "reason_code", lifecycle: "lifecycle" };

/**
 * The filter as the gateway takes it, or null if it cannot evaluate all of it: words, ages and beginnings of names are
 * compared here, with the letters that are loaded.
 */
export function gatewayFilter(filter: Filter, known: Record<string, readonly string[]>): LetterFilter | null {
  if (filter.words.length > 0 || filter.unknown.length > 0) return null;
  const made: LetterFilter = {};
  for (const term of filter.terms) {
    const name = OF_GATEWAY[term.field];
    if (name === undefined || term.op !== ":" || known[term.field]?.includes(term.value) !== true || name in made) return null;
    made[name] = term.value;
  }
  return made;
}

/**
 * The filter of the gateway that selects the letters of this group and no others; null if there is none. `all` are all
 * letters that the gateway selects by `whole`.
 */
export function filterOfGroup<T extends Letter>(group: LetterGroup<T>, all: readonly T[], whole: LetterFilter): LetterFilter | null {
  const { lifecycle } = whole;
  const alike = all.filter((one) => one.type === group.type && one.reason_code === group.reason_code);
  if (alike.length !== group.letters.length) return null;
  return { type: group.type, reason_code: group.reason_code, ...(lifecycle === undefined ? {} : { lifecycle }) };
}

export interface Progress {
  done: number;
  failed: number;
}

/** What the gateway answers for one job. A refused one has a `status` too: the one that it keeps, and a `reason`. */
export type RequeueAnswer = Record<string, unknown>;

/**
 * Requeue as many jobs as were counted, piece by piece; `requeue` asks for at most so many and returns an answer for
 * each. With a filter, the gateway chooses each piece: it ends early when nothing is left, or when a whole piece was
 * refused, because the same jobs would come again. With ids, each piece names other jobs, so every piece is asked for.
 * No piece begins once `signal` is aborted; then it throws the signal's reason.
 */
export async function requeueCounted(
  total: number,
  atOnce: number,
  by: "filter" | "ids",
  requeue: (from: number, count: number) => Promise<RequeueAnswer[]>,
  onProgress: (progress: Progress) => void,
  signal: AbortSignal,
): Promise<Progress> {
  const refused = new Set<unknown>();
  let done = 0;
  let asked = 0;
  while (asked < total) {
    signal.throwIfAborted();
    const count = Math.min(atOnce, total - asked);
    const answers = await requeue(asked, count);
    const moved = answers.filter((one) => one["requeued"] === true).length;
    for (const one of answers) if (one["requeued"] !== true) refused.add(one["job_id"]);
    done += moved;
    asked += by === "ids" ? count : answers.length;
    onProgress({ done, failed: refused.size });
    if (by === "filter" && moved === 0) break;
  }
  return { done, failed: refused.size };
}
