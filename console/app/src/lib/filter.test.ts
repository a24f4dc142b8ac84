import { describe, expect, it } from "vitest";
import { complete, parseFilter, passes, seconds, valueOf, type FilterFields } from "./filter";

const FIELDS: FilterFields = {
  status: { values: ["failed", "running", "dead lettered"] },
  agent: {},
  age: { duration: true },
};

describe("parseFilter", () => {
  it("reads fields, durations, quoted values and words", () => {
    expect(parseFilter('status:failed agent:"the violin" age>5m run_1', FIELDS)).toEqual({
      terms: [
        { field: "status", op: ":", value: "failed" },
        { field: "agent", op: ":", value: "the violin" },
        { field: "age", op: ">", value: "5m" },
      ],
      words: ["run_1"],
      unknown: [],
    });
  });

  it("names what it cannot use, and takes an unknown field with a colon as a word", () => {
    const filter = parseFilter("age>soon status>3 size>4 http://x", FIELDS);
    expect(filter.unknown).toEqual(["age>soon", "status>3", "size>4"]);
    expect(filter.words).toEqual(["http://x"]);
  });

  it("lets the last value of a field count", () => {
    expect(valueOf(parseFilter("status:failed status:running", FIELDS), "status")).toBe("running");
  });

  it("ignores a field that has no value yet", () => {
    expect(parseFilter("status:", FIELDS).terms).toEqual([]);
  });
});

describe("passes", () => {
  it("compares durations in seconds and words without regard to case", () => {
    const filter = parseFilter("age>5m RUN_1", FIELDS);
    expect(passes(filter, { id: "run_1", age: 301 })).toBe(true);
    expect(passes(filter, { id: "run_1", age: 299 })).toBe(false);
    expect(passes(filter, { id: "run_2", age: 301 })).toBe(false);
  });
});

describe("a misspelt field", () => {
  it("is named to the person, and a word with a colon is searched for", () => {
    for (const typed of ["statu:failed", "stauts:failed", "agnet:x", "agents:x", "statos:failed"]) expect(parseFilter(typed, FIELDS).unknown).toEqual([typed]);
    expect(parseFilter("https://host nlm:42", FIELDS)).toEqual({ terms: [], words: ["https://host", "nlm:42"], unknown: [] });
  });
});

describe("complete", () => {
  it("offers fields, then values of the field", () => {
    expect(complete("", FIELDS).map((one) => one.label)).toEqual(["status:", "agent:", "age>"]);
    expect(complete("agent:x st", FIELDS).map((one) => one.text)).toEqual(["agent:x status:"]);
    expect(complete("agent:x status:d", FIELDS).map((one) => one.text)).toEqual(['agent:x status:"dead lettered" ']);
    expect(complete("age>1", FIELDS).map((one) => one.label)).toEqual(["age>1m", "age>1h", "age>1d"]);
  });
});

describe("seconds", () => {
  it("reads every unit and nothing else", () => {
    expect(["250ms", "30s", "5m", "2h", "1d", "5", "m", "-1s"].map(seconds)).toEqual([0.25, 30, 300, 7200, 86400, null, null, null]);
  });
});
