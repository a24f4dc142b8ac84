/** Dead letters grouped by what went wrong. */

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
