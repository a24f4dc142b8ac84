import { describe, expect, it } from "vitest";
import { find, idKind, type Entry } from "./search";

const entry = (kind: Entry["kind"], id: string, title: string, note = ""): Entry => ({ kind, id, title, note, to: "/" });
const ENTRIES = [
  entry("screen", "/console/runs", "Runs"),
  entry("agent", "archivist-violin", "archivist-violin", "Violin archivist"),
  entry("run", "run_1", "run_1", "archivist-violin failed"),
  entry("error", "j1", "mailbox is full", "mail.send"),
];

describe("find", () => {
  it("wants every word, and puts what begins with the text first", () => {
    expect(find(ENTRIES, "violin failed").map((one) => one.id)).toEqual(["run_1"]);
    expect(find(ENTRIES, "run").map((one) => one.id)).toEqual(["/console/runs", "run_1"]);
    expect(find(ENTRIES, "mail full").map((one) => one.kind)).toEqual(["error"]);
    expect(find(ENTRIES, "").length).toBe(4);
    expect(find(ENTRIES, "nothing like it")).toEqual([]);
  });

  it("shows a few of each kind", () => {
    const many = Array.from({ length: 40 }, (_, at) => entry("job", `job-${at}`, `job-${at}`));
    expect(find([...many, ...ENTRIES], "").length).toBeLessThan(15);
  });

  it("knows ids by their form", () => {
    expect(["run_2026-01-01_x", "prop_2026-01-01_x", "0b5c1f6e-1111-4222-8333-444455556666", "short", "two words"].map(idKind)).toEqual([
      "run",
      "proposal",
      "job",
      null,
      null,
    ]);
  });
});
