import { describe, expect, it } from "vitest";
import { seenText } from "./proposals";

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
