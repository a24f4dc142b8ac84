/** The search over everything (Cmd-K): which entries fit what was typed, the best first. */

export interface Entry {
  /** What kind of thing it is; entries of a kind stand together. */
  kind: "screen" | "run" | "proposal" | "job" | "agent" | "error" | "alert";
  id: string;
  title: string;
  /** More words that it is found by, shown beside the title. */
  note: string;
  to: string;
  params?: Record<string, string>;
  search?: Record<string, string>;
}

export const QUERY_MAX = 200;
/** How many entries of one kind are shown; screens are few, and all of them are. */
const SHOWN_PER_KIND = 6;
const KINDS: readonly Entry["kind"][] = ["screen", "agent", "run", "proposal", "job", "error", "alert"];

/** Every word must occur. An id or title that begins with the text comes before one that contains it. */
export function find(entries: readonly Entry[], text: string): Entry[] {
  const query = text.slice(0, QUERY_MAX).trim().toLowerCase();
  const words = query.split(/\s+/).filter(Boolean);
  const scored = entries.flatMap((entry) => {
    const [title, id] = [entry.title.toLowerCase(), entry.id.toLowerCase()];
    const whole = `${title}\n${id}\n${entry.note.toLowerCase()}`;
    if (!words.every((word) => whole.includes(word))) return [];
    const score = id === query ? 0 : title.startsWith(query) || id.startsWith(query) ? 1 : title.includes(query) || id.includes(query) ? 2 : 3;
    return [{ entry, score }];
  });
  scored.sort((a, b) => a.score - b.score);
  const best = new Map<Entry["kind"], number>();
  for (const { entry, score } of scored) best.set(entry.kind, Math.min(score, best.get(entry.kind) ?? 9));
  const kinds = KINDS.filter((kind) => best.has(kind)).sort((a, b) => (best.get(a) ?? 9) - (best.get(b) ?? 9));
  return kinds.flatMap((kind) => scored.filter((one) => one.entry.kind === kind).slice(0, kind === "screen" ? undefined : SHOWN_PER_KIND).map((one) => one.entry));
}

/** What a typed id names, by its form: it is looked up although no list has it. */
export function idKind(text: string): "run" | "proposal" | "job" | null {
  const word = text.trim();
  if (/^run_[\w-]{6,}$/.test(word)) return "run";
  if (/^prop_[\w-]{6,}$/.test(word)) return "proposal";
  return /^[A-Za-z0-9][A-Za-z0-9._:@-]{7,199}$/.test(word) ? "job" : null;
}
