import { describe, expect, it } from "vitest";
import { asText, contentOf, epochOf, readable, titleOf } from "./artifacts";
import { locate, stateOf } from "./citations";

const brief = {
  artifact_id: "art_1",
  type: "RESEARCH_BRIEF",
  content: {
    title: "Bows",
    summary: "Strung with hair.",
    sections: [{ heading: "Hair", body: "Horsehair.", sources: ["sources/bows.md"] }],
    conclusions: ["Rehair it."],
    open_questions: ["Who does it?"],
  },
  sources: [{ ref: "sources/bows.md", excerpt: "A bow is strung." }],
};

describe("artifacts", () => {
  it("reads each part of a research brief as lines", () => {
    const lines = asText(brief).split("\n");
    for (const one of ["# Bows", "## Hair", "Horsehair.", "- Rehair it.", "? Who does it?", "> A bow is strung."]) expect(lines).toContain(one);
  });

  it("shows a type that it does not know as sorted JSON", () => {
    const other = { ...brief, type: "NEW_TYPE", content: { b: 1, a: { d: 2, c: 3 } }, sources: [] };
    expect(contentOf(other)).toBeNull();
    expect(titleOf(other)).toBe("art_1");
    expect(asText(other)).toBe(readable({ a: { c: 3, d: 2 }, b: 1 }));
  });

  it("finds the number of a context at the end of its address only", () => {
    expect(epochOf("https://gateway.example/jobs/1/context/12")).toBe(12);
    expect(epochOf("https://gateway.example/context/12/other")).toBeNull();
    expect(epochOf(null)).toBeNull();
  });
});

describe("citations", () => {
  const sources = new Map([["a.md", "😀 A bow is strung with hair. A bow is old."]]);

  it("tells verified, unverified and unchecked apart", () => {
    expect(stateOf({ ref: "a.md", excerpt: "A bow is strung" }, sources)).toBe("verified");
    expect(stateOf({ ref: "a.md", excerpt: "A bow is STRUNG" }, sources)).toBe("unverified");
    expect(stateOf({ ref: "b.md", excerpt: "A bow" }, sources)).toBe("unchecked");
  });

  it("takes the position that the citation names, counted in code points", () => {
    const text = sources.get("a.md") ?? "";
    expect(locate(text, { ref: "a.md", excerpt: "A bow is", start: 29, end: 37 })?.after).toBe(" old.");
    expect(locate(text, { ref: "a.md", excerpt: "A bow is", start: 1, end: 9 })?.before).toBe("😀 ");
  });
});
