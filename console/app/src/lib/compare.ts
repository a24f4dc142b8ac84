/** Compares two texts line by line, as a unified diff that `wordDiff` can mark. */

const CONTEXT_LINES = 3;
/** Above this product of line counts the texts are shown as removed and added: the table has that many cells. */
const CELLS_MAX = 4_000_000;

interface Line {
  mark: " " | "-" | "+";
  text: string;
}

/** The unified diff from `before` to `after`; null if they have the same lines. A newline at the end begins no line. */
export function unifiedDiff(before: string, after: string): string | null {
  const trimmed = { before: before.replace(/\n$/, ""), after: after.replace(/\n$/, "") };
  if (trimmed.before === trimmed.after) return null;
  const lines = compared(trimmed.before.split("\n"), trimmed.after.split("\n"));
  const near = lines.map((_, at) => lines.slice(Math.max(0, at - CONTEXT_LINES), at + CONTEXT_LINES + 1).some((one) => one.mark !== " "));
  const hunks: { old: number; now: number; lines: Line[] }[] = [];
  let [old, now] = [1, 1];
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at] as Line;
    if (near[at]) {
      if (at === 0 || !near[at - 1]) hunks.push({ old, now, lines: [] });
      hunks.at(-1)?.lines.push(line);
    }
    if (line.mark !== "+") old += 1;
    if (line.mark !== "-") now += 1;
  }
  return hunks
    .flatMap((hunk) => {
      const without = (mark: Line["mark"]) => hunk.lines.filter((one) => one.mark !== mark).length;
      return [`@@ -${hunk.old},${without("+")} +${hunk.now},${without("-")} @@`, ...hunk.lines.map((one) => one.mark + one.text)];
    })
    .join("\n");
}

function compared(before: string[], after: string[]): Line[] {
  const equal = (list: string[]): Line[] => list.map((text) => ({ mark: " ", text }));
  let start = 0;
  while (start < before.length && start < after.length && before[start] === after[start]) start += 1;
  let end = 0;
  while (end < before.length - start && end < after.length - start && before[before.length - 1 - end] === after[after.length - 1 - end]) end += 1;
  const middle = changed(before.slice(start, before.length - end), after.slice(start, after.length - end));
  return [...equal(before.slice(0, start)), ...middle, ...equal(before.slice(before.length - end))];
}

function changed(a: string[], b: string[]): Line[] {
  const lines: Line[] = [];
  if (a.length * b.length > CELLS_MAX) {
    return [...a.map((text): Line => ({ mark: "-", text })), ...b.map((text): Line => ({ mark: "+", text }))];
  }
  // For each pair of positions, how many lines the rests from there have in common, in order.
  const width = b.length + 1;
  const length = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      length[i * width + j] =
        a[i] === b[j]
          ? (length[(i + 1) * width + j + 1] ?? 0) + 1
          : Math.max(length[(i + 1) * width + j] ?? 0, length[i * width + j + 1] ?? 0);
    }
  }
  for (let i = 0, j = 0; i < a.length || j < b.length; ) {
    const [one, other] = [a[i], b[j]];
    if (one !== undefined && one === other) {
      lines.push({ mark: " ", text: one });
      i += 1;
      j += 1;
    } else if (other === undefined || (one !== undefined && (length[(i + 1) * width + j] ?? 0) >= (length[i * width + j + 1] ?? 0))) {
      lines.push({ mark: "-", text: one ?? "" });
      i += 1;
    } else {
      lines.push({ mark: "+", text: other });
      j += 1;
    }
  }
  return lines;
}
