/** The part of Markdown that runbooks use, read into blocks. The console draws them as elements, never as markup. */

export type Span = { kind: "text" | "code" | "strong"; text: string };
export type Block =
  | { kind: "heading"; level: number; spans: Span[] }
  | { kind: "paragraph"; spans: Span[] }
  | { kind: "list"; ordered: boolean; items: Span[][] }
  | { kind: "code"; text: string };

export const TEXT_MAX = 200_000;

export function blocksOf(text: string): Block[] {
  const blocks: Block[] = [];
  const lines = text.slice(0, TEXT_MAX).split("\n");
  let paragraph: string[] = [];
  const flush = () => {
    if (paragraph.length > 0) blocks.push({ kind: "paragraph", spans: spansOf(paragraph.join(" ")) });
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at] ?? "";
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    const item = /^\s{0,3}(?:(\d+)\.|[-*])\s+(.*)$/.exec(line);
    if (line.startsWith("```")) {
      flush();
      const end = lines.findIndex((one, place) => place > at && one.startsWith("```"));
      const last = end === -1 ? lines.length : end;
      blocks.push({ kind: "code", text: lines.slice(at + 1, last).join("\n") });
      at = last;
    } else if (heading !== null) {
      flush();
      blocks.push({ kind: "heading", level: heading[1]?.length ?? 1, spans: spansOf(heading[2] ?? "") });
    } else if (item !== null) {
      flush();
      let words = item[2] ?? "";
      while (/^\s{2,}\S/.test(lines[at + 1] ?? "")) words += ` ${(lines[(at += 1)] ?? "").trim()}`;
      const ordered = item[1] !== undefined;
      const before = blocks.at(-1);
      if (before?.kind === "list" && before.ordered === ordered) before.items.push(spansOf(words));
      else blocks.push({ kind: "list", ordered, items: [spansOf(words)] });
    } else if (line.trim() === "") flush();
    else paragraph.push(line.trim());
  }
  flush();
  return blocks;
}

/** Code between backticks, strong text between two asterisks; a link is its words. */
export function spansOf(text: string): Span[] {
  const spans: Span[] = [];
  for (const part of text.replace(/\[([^\]]*)\]\([^)]*\)/g, "$1").split(/(`[^`]+`|\*\*[^*]+\*\*)/)) {
    if (part.startsWith("`") && part.length > 2) spans.push({ kind: "code", text: part.slice(1, -1) });
    else if (part.startsWith("**") && part.length > 4) spans.push({ kind: "strong", text: part.slice(2, -2) });
    else if (part !== "") spans.push({ kind: "text", text: part });
  }
  return spans;
}
