import { describe, expect, it } from "vitest";
import { groundsOf, seenText } from "./proposals";

const steps = [{ result: {} }, { result: { sources: [{ ref: "sources/a.md", text: "as it was", sha256: "1f" }, "odd", null] } }];

describe("seenText", () => {
  it("is the text of the target with the hash that the proposal names", () => {
    expect(seenText({ target: "sources/a.md", target_hash: "1f" }, steps)).toBe("as it was");
  });

  it("is null where the run has read another text, or none", () => {
    expect(seenText({ target: "sources/a.md", target_hash: "2e" }, steps)).toBeNull();
    expect(seenText({ target: "notes/b.md", target_hash: null }, steps)).toBeNull();
    expect(seenText({ target: "sources/a.md", target_hash: "1f" }, [])).toBeNull();
  });
});

describe("groundsOf", () => {
  const doubtful = { reasoning: "why", citations: [{ ref: "a", excerpt: "x" }], flags: ["citation_not_found:a"], not_found: [{ ref: "a", excerpt: "y" }] };

  it("has what could not be confirmed, of the proposal itself and of each of its grounds", () => {
    const own = { reasons: ["why"], citations: [{ ref: "a", excerpt: "x" }], flags: ["citation_not_found:a"], notFound: [{ ref: "a", excerpt: "y" }], notRead: [] };
    expect(groundsOf({ content: doubtful })).toEqual(own);
    const several = groundsOf({ content: { grounds: [{ not_read: [{ ref: "b", excerpt: "z" }] }, doubtful] } });
    expect(several).toEqual({ ...own, notRead: [{ ref: "b", excerpt: "z" }] });
  });

  it("leaves out what is of another form", () => {
    const nothing = { reasons: [], citations: [], flags: [], notFound: [], notRead: [] };
    for (const grounds of [[null, "abc", 3], [{ citations: {}, flags: "x" }], [{ citations: [{}, null, { ref: 1, excerpt: "x" }] }]]) {
      expect(groundsOf({ content: { grounds } })).toEqual(nothing);
    }
  });
});
