import { describe, expect, it } from "vitest";
import { wordDiff, words } from "./diff";

const marked = (line: { segments: { text: string; changed: boolean }[] }) =>
  line.segments.map((one) => (one.changed ? `[${one.text}]` : one.text)).join("");

describe("wordDiff", () => {
  it("marks the words of a line that changed", () => {
    const diff = wordDiff("--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n same\n-kept at 60 percent\n+kept at 55 percent\n end\n");
    expect(diff.map((line) => [line.kind, marked(line)])).toEqual([
      ["file", "--- a/x"],
      ["file", "+++ b/x"],
      ["hunk", "@@ -1,3 +1,3 @@"],
      ["context", "same"],
      ["remove", "kept at [60] percent"],
      ["add", "kept at [55] percent"],
      ["context", "end"],
    ]);
  });

  it("keeps a line of the text that looks like a header of the diff", () => {
    const diff = wordDiff("--- a\n+++ b\n@@ -1,2 +1,1 @@\n---- rule\n-+++ text\n");
    expect(diff.slice(3).map((line) => [line.kind, marked(line)])).toEqual([
      ["remove", "--- rule"],
      ["remove", "+++ text"],
    ]);
  });

  it("shows the headers of each file of several, and text that looks like one as text", () => {
    const first = "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n same\n--- old rule\n+++ new rule\n";
    const second = "--- a/y\n+++ b/y\n@@ -1 +1 @@\n-one\n+two\n@@ -9,0 +10 @@\n+end\n";
    expect(wordDiff(first + second).map((line) => [line.kind, line.segments.map((one) => one.text).join("")])).toEqual([
      ["file", "--- a/x"],
      ["file", "+++ b/x"],
      ["hunk", "@@ -1,2 +1,2 @@"],
      ["context", "same"],
      ["remove", "-- old rule"],
      ["add", "++ new rule"],
      ["file", "--- a/y"],
      ["file", "+++ b/y"],
      ["hunk", "@@ -1 +1 @@"],
      ["remove", "one"],
      ["add", "two"],
      ["hunk", "@@ -9,0 +10 @@"],
      ["add", "end"],
    ]);
  });

  it("shows every line of a text that does not fit the counts of its hunk", () => {
    const kinds = wordDiff("@@ -1 +1,2 @@\n-a\n-b\n+c\n+d\n+e\n kept\n").map((line) => [line.kind, line.segments[0]?.text]);
    expect(kinds.slice(1)).toEqual([
      ["remove", "a"],
      ["remove", "b"],
      ["add", "c"],
      ["add", "d"],
      ["add", "e"],
      ["context", "kept"],
    ]);
  });

  it("marks no word of a line that was only added", () => {
    expect(wordDiff("@@ -0,0 +1 @@\n+all new\n")[1]).toEqual({
      kind: "add",
      segments: [{ text: "all new", changed: false }],
    });
  });

  it("compares lines with nothing in common as a whole", () => {
    expect(words("the cat sat", "un chien dort ici")).toBeNull();
  });

  it("bounds the comparison of very long lines", () => {
    const long = "word ".repeat(2_000);
    expect(words(long, `${long}!`)).toBeNull();
  });

  it("gives back both texts whole, in any script", () => {
    const pairs: [string, string][] = [
      ["Скрипка висить праворуч.", "Скрипка висить ліворуч, у шафі."],
      ["a  b", "a b  "],
      ["", "x"],
    ];
    for (const [before, after] of pairs) {
      const found = words(before, after);
      if (found === null) continue;
      expect(found.map((side) => side.map((one) => one.text).join(""))).toEqual([before, after]);
    }
  });
});
