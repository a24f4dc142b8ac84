import { describe, expect, it } from "vitest";
import { paramsOf, rowsOf, textOf } from "./params";

const row = (name: string, value: string) => ({ name, value });

describe("paramsOf", () => {
  it("reads JSON where it is JSON, and text elsewhere", () => {
    const { params } = paramsOf([row("topic", "bows"), row("max", "3"), row("deep", "true"), row(" list ", '["a"]'), row("", "")]);
    expect(params).toEqual({ topic: "bows", max: 3, deep: true, list: ["a"] });
  });

  it("refuses a value without a name, and a name that comes twice", () => {
    expect(paramsOf([row(" ", "x")]).problem).toBe("unnamed");
    expect(paramsOf([row("a", "1"), row("a ", "2")]).problem).toBe("twice");
    expect(paramsOf([row("toString", "1")]).problem).toBeNull();
  });

  it("gives parameters back as rows", () => {
    const given = { topic: "bows", number: "3", deep: { a: [true, null] } };
    expect(paramsOf(rowsOf(given)).params).toEqual(given);
  });

  it("writes text so that it is read back as the same value", () => {
    for (const value of ["bows", "3", 3, true, null, { a: [1] }, '"quoted"']) {
      expect(paramsOf([row("v", textOf(value))]).params["v"]).toEqual(value);
    }
  });
});
