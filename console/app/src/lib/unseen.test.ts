import { describe, expect, it } from "vitest";
import { unseenIn, writtenOut } from "./unseen";

describe("writtenOut", () => {
  it("shows characters that are invisible or reorder the text, and leaves lines as they are", () => {
    expect(writtenOut("pay \u202e100\u200b\r\n\tend\u{e0041}")).toBe("pay \\u202e100\\u200b\n\tend\\U000e0041");
    expect(writtenOut("Ціна: 5 €")).toBe("Ціна: 5 €");
  });
  it("shows each of the characters that the command line writes out", () => {
    const hidden = Array.from(
      "\x00\x07\x1b\x7f\x85\x9b\u00ad\u034f\u061c\u115f\u1160\u200b\u200d\u200f\u202e\u2028\u2060\u2066\u2800\u3164\ufeff\ufe00\ufe0f" +
        "\u{e0041}\u{e0100}\u{e01ef}\ue000",
    );
    expect(hidden.filter((one) => writtenOut(one) === one || unseenIn(one).length !== 1)).toEqual([]);
  });
});

describe("unseenIn", () => {
  it("names each character once, wherever it is in the document", () => {
    expect(unseenIn({ a: ["x\u200b", { b: "\u202e\u200b" }], c: 3, d: null })).toEqual(["\\u200b", "\\u202e"]);
  });
});
