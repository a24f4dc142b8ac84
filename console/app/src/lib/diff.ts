/** A unified diff as lines with the changed words marked. */

export interface Segment {
  text: string;
  changed: boolean;
}

export interface DiffLine {
  kind: "file" | "hunk" | "context" | "add" | "remove";
  segments: Segment[];
}

/** Above this product of word counts two lines are compared as a whole: the table of the comparison has that many cells. */
const CELLS_MAX = 250_000;
/** Two lines that share less than this part of their words are different lines, not one line that changed. */
const ALIKE_MIN = 0.25;
/** A hunk's header: how many lines of the old and of the new text follow; 1 where no number stands. */
const HUNK = /^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@/;
const HEADER = /^(---|\+\+\+) /;

/** The lines of a unified diff of one file or several. Inside a hunk, as long as its header counts, every line is text. */
export function wordDiff(unified: string): DiffLine[] {
  const lines = unified.replace(/\n$/, "").split("\n");
  const made: DiffLine[] = [];
  let [old, now] = [0, 0];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at] ?? "";
    const isBetween = old <= 0 && now <= 0;
    const hunk = isBetween ? HUNK.exec(line) : null;
    if (hunk !== null) {
      [old, now] = [Number(hunk[1] ?? 1), Number(hunk[2] ?? 1)];
      made.push(plain("hunk", line));
    } else if (isBetween && HEADER.test(line)) made.push(plain("file", line));
    else if (line.startsWith("-") || line.startsWith("+")) {
      // Lines that no header counts are shown as changed one by one: a header of a file may follow.
      const removed = run(lines, at, "-", isBetween ? 1 : old);
      const added = run(lines, at + removed.length, "+", isBetween ? 1 - removed.length : now);
      if (removed.length + added.length === 0) {
        [old, now] = [0, 0]; // the counts do not fit the text
        continue;
      }
      made.push(...block(removed, added));
      [old, now] = [old - removed.length, now - added.length];
      at += removed.length + added.length;
      continue;
    } else if (!line.startsWith("\\")) {
      made.push(plain("context", line.slice(1)));
      [old, now] = [old - 1, now - 1];
    }
    at += 1;
  }
  return made;
}

function run(lines: string[], from: number, mark: string, most: number): string[] {
  const found: string[] = [];
  for (let at = from; found.length < most && lines[at]?.startsWith(mark); at += 1) found.push(lines[at]?.slice(1) ?? "");
  return found;
}

function block(removed: string[], added: string[]): DiffLine[] {
  const before: DiffLine[] = removed.map((text) => ({ kind: "remove", segments: [{ text, changed: added.length > 0 }] }));
  const after: DiffLine[] = added.map((text) => ({ kind: "add", segments: [{ text, changed: removed.length > 0 }] }));
  for (let at = 0; at < Math.min(removed.length, added.length); at += 1) {
    const pair = words(removed[at] ?? "", added[at] ?? "");
    if (pair === null) continue;
    before[at] = { kind: "remove", segments: pair[0] };
    after[at] = { kind: "add", segments: pair[1] };
  }
  return [...before, ...after];
}

/** Two lines with the words that differ marked; null if they have too little in common, or are too long to compare. */
export function words(before: string, after: string): [Segment[], Segment[]] | null {
  const a = tokens(before);
  const b = tokens(after);
  if (a.length * b.length > CELLS_MAX) return null;
  const length = common(a, b);
  const left: Segment[] = [];
  const right: Segment[] = [];
  let shared = 0;
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    const one = a[i];
    const other = b[j];
    if (one !== undefined && one === other) {
      append(left, one, false);
      append(right, one, false);
      if (one.trim() !== "") shared += 1;
      i += 1;
      j += 1;
    } else if (other === undefined || (one !== undefined && (length[i + 1]?.[j] ?? 0) >= (length[i]?.[j + 1] ?? 0))) {
      append(left, one ?? "", true);
      i += 1;
    } else {
      append(right, other, true);
      j += 1;
    }
  }
  const most = Math.max(count(a), count(b));
  return most > 0 && shared / most < ALIKE_MIN ? null : [left, right];
}

/** For each pair of positions, how many tokens the rests from there have in common, in order. */
function common(a: string[], b: string[]): Uint32Array[] {
  const length = Array.from({ length: a.length + 1 }, () => new Uint32Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      const row = length[i] as Uint32Array;
      row[j] =
        a[i] === b[j] ? (length[i + 1]?.[j + 1] ?? 0) + 1 : Math.max(length[i + 1]?.[j] ?? 0, row[j + 1] ?? 0);
    }
  }
  return length;
}

function tokens(line: string): string[] {
  return line.match(/[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) ?? [];
}

function count(list: string[]): number {
  return list.filter((one) => one.trim() !== "").length;
}

function append(segments: Segment[], text: string, changed: boolean): void {
  const last = segments.at(-1);
  if (last !== undefined && last.changed === changed) last.text += text;
  else segments.push({ text, changed });
}

function plain(kind: DiffLine["kind"], text: string): DiffLine {
  return { kind, segments: [{ text, changed: false }] };
}
