import { describe, expect, it } from "vitest";
import { groupOf, rolesOf, rulesLike, verdictOf, type Rule } from "./authority";

const CANCEL: Rule = { name: "jobs.cancel", action: "cancel jobs", source: "D43", grants: { owner: "own", worker: "no", "control-plane": "yes" } };
const DELETE: Rule = { name: "jobs.delete", action: "delete jobs", source: "document 000, 4.1", grants: { owner: "no", worker: "no", "control-plane": "no" } };

describe("authority", () => {
  it("lets the widest right of several roles count", () => {
    expect(verdictOf(CANCEL, ["owner", "control-plane"])).toEqual({ grant: "yes", by: ["control-plane"], holders: ["owner", "control-plane"] });
    expect(verdictOf(CANCEL, ["worker", "owner"])).toMatchObject({ grant: "own", by: ["owner"] });
    expect(verdictOf(CANCEL, ["worker"])).toMatchObject({ grant: "no", by: ["worker"] });
    expect(verdictOf(CANCEL, ["a role of tomorrow"])).toMatchObject({ grant: "no" });
    expect(verdictOf(DELETE, ["owner"])).toMatchObject({ grant: "no", holders: [] });
  });

  it("finds rules by words", () => {
    expect(rulesLike([CANCEL, DELETE], "jobs 4.1")).toEqual([DELETE]);
    expect(rolesOf([CANCEL])).toEqual(["owner", "worker", "control-plane"]);
    expect(groupOf(CANCEL)).toBe("jobs");
  });
});
