/** The filter language of the tables: `status:failed agent:violin age>5m words of the id`. */

export interface Term {
  field: string;
  op: ":" | ">" | "<";
  value: string;
}

export interface Filter {
  terms: Term[];
  /** Words without a field: each must occur in the row. */
  words: string[];
  /** Why a term cannot be used, for the person who typed it. */
  unknown: string[];
}

export interface FilterField {
  /** Values that completion offers. */
  values?: readonly string[];
  /** Compared by `>` and `<` as a duration: 30s, 5m, 2h, 1d. */
  duration?: boolean;
}

export type FilterFields = Record<string, FilterField>;

const TERM = /^([\p{L}_]+)([:<>])(.*)$/u;
const DURATION = /^(\d+(?:\.\d+)?)(ms|s|m|h|d)$/;
const SECONDS: Record<string, number> = { ms: 0.001, s: 1, m: 60, h: 3_600, d: 86_400 };
export const TEXT_MAX = 500;

export function parseFilter(text: string, fields: FilterFields): Filter {
  const filter: Filter = { terms: [], words: [], unknown: [] };
  for (const part of split(text.slice(0, TEXT_MAX))) {
    const found = TERM.exec(part);
    const field = found?.[1]?.toLowerCase();
    if (found === null || field === undefined || !(field in fields)) {
      // A word may have a colon, as ids and addresses do. What is almost a field is a field that was misspelt.
      const isMeant = field !== undefined && Object.keys(fields).some((known) => isMisspelt(field, known));
      if (found !== null && (found[2] !== ":" || isMeant)) filter.unknown.push(part);
      else filter.words.push(unquoted(part).toLowerCase());
      continue;
    }
    const op = found[2] as Term["op"];
    const value = unquoted(found[3] ?? "");
    const isDuration = fields[field]?.duration === true;
    if (isDuration ? op === ":" || seconds(value) === null : op !== ":") filter.unknown.push(part);
    else if (value !== "") filter.terms.push({ field, op, value });
  }
  return filter;
}

/** Whether a word becomes the other one by a letter left out, added or exchanged, or by two neighbours that changed places. */
function isMisspelt(word: string, other: string): boolean {
  const [short, long] = word.length <= other.length ? [word, other] : [other, word];
  if (long.length < 3 || long.length - short.length > 1) return false;
  let at = 0;
  while (at < short.length && short[at] === long[at]) at += 1;
  if (short.length < long.length) return short.slice(at) === long.slice(at + 1);
  const isSwapped = short[at] === long[at + 1] && short[at + 1] === long[at] && short.slice(at + 2) === long.slice(at + 2);
  return short.slice(at + 1) === long.slice(at + 1) || isSwapped;
}

/** The value of a field that is compared for equality; the last one counts. */
export function valueOf(filter: Filter, field: string): string | undefined {
  return filter.terms.findLast((term) => term.field === field && term.op === ":")?.value;
}

/** Whether a row passes: `values` has what fields and words are compared with, durations in seconds. */
export function passes(filter: Filter, values: Record<string, string | number | null | undefined>): boolean {
  const all = Object.values(values).join("\n").toLowerCase();
  return (
    filter.words.every((word) => all.includes(word)) &&
    filter.terms.every((term) => {
      const value = values[term.field];
      if (value === undefined) return true; // the server has filtered by it
      if (term.op === ":") return String(value ?? "").toLowerCase().includes(term.value.toLowerCase());
      const limit = seconds(term.value) ?? 0;
      return typeof value === "number" && (term.op === ">" ? value > limit : value < limit);
    })
  );
}

export function seconds(text: string): number | null {
  const found = DURATION.exec(text);
  return found === null ? null : Number(found[1]) * (SECONDS[found[2] ?? ""] ?? 0);
}

export interface Completion {
  /** The whole text once the completion is taken. */
  text: string;
  label: string;
}

/** What may stand where the last word is typed. */
export function complete(text: string, fields: FilterFields): Completion[] {
  const parts = split(text, true);
  const last = parts.at(-1) ?? "";
  const before = text.slice(0, text.length - last.length);
  const found = TERM.exec(last);
  const field = found?.[1]?.toLowerCase();
  if (found !== null && field !== undefined && fields[field] !== undefined) {
    const typed = unquoted(found[3] ?? "").toLowerCase();
    const values = fields[field].duration ? ["1m", "5m", "1h", "1d"] : (fields[field].values ?? []);
    return values
      .filter((value) => value.toLowerCase().startsWith(typed) && value.toLowerCase() !== typed)
      .map((value) => {
        const label = `${field}${found[2]}${/\s/.test(value) ? `"${value}"` : value}`;
        return { text: `${before}${label} `, label };
      });
  }
  return Object.entries(fields)
    .filter(([name]) => name.startsWith(last.toLowerCase()))
    .map(([name, one]) => ({ text: `${before}${name}${one.duration ? ">" : ":"}`, label: `${name}${one.duration ? ">" : ":"}` }));
}

function split(text: string, keepEmptyEnd = false): string[] {
  const parts = text.match(/(?:[^\s"]|"[^"]*"?)+/g) ?? [];
  return keepEmptyEnd && (text === "" || /\s$/.test(text)) ? [...parts, ""] : parts;
}

function unquoted(text: string): string {
  return text.replaceAll('"', "");
}
