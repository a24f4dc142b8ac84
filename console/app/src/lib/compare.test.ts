import { describe, expect, it } from "vitest";
import { unifiedDiff } from "./compare";

describe("unifiedDiff", () => {
  it("is null for equal texts", () => {
    expect(unifiedDiff("one\ntwo", "one\ntwo")).toBeNull();
    expect(unifiedDiff("one\ntwo", "one\ntwo\n")).toBeNull();
  });

  it("shows what changed with three lines around it", () => {
    const before = "a\nb\nc\nd\ne\nf\ng\nh";
    expect(unifiedDiff(before, before.replace("e", "E"))).toBe("@@ -2,7 +2,7 @@\n b\n c\n d\n-e\n+E\n f\n g\n h");
  });

  it("puts changes that are far apart into hunks of their own", () => {
    const lines = Array.from({ length: 20 }, (_, at) => `line ${at}`);
    const made = unifiedDiff(lines.join("\n"), ["new", ...lines.slice(0, -1), "other end"].join("\n")) ?? "";
    expect(made.match(/^@@ .*$/gm)).toEqual(["@@ -1,3 +1,4 @@", "@@ -17,4 +18,4 @@"]);
    expect(made).toContain("+new");
    expect(made).toContain("-line 19\n+other end");
  });

  it("bounds the comparison of long texts and still shows both", () => {
    const [a, b] = ["a", "b"].map((word) => Array.from({ length: 2_500 }, (_, at) => `${word} ${at}`).join("\n"));
    expect(unifiedDiff(a ?? "", b ?? "")?.split("\n")).toHaveLength(5_001);
  });
});
