/**
 * Characters that a screen does not show, or that reorder what it shows. They are those of `_UNSEEN` in src/trellis/cli/output.py;
 * tests/cli/test_output.py compares the two lists.
 */
const UNSEEN = new RegExp(
  [
    // Control characters but tab and newline.
    String.raw`[\u{0}-\u{8}\u{b}-\u{1f}\u{7f}-\u{9f}]`,
    // Direction and order of text.
    String.raw`[\u{61c}\u{200e}\u{200f}\u{202a}-\u{202e}\u{2066}-\u{2069}\u{2028}\u{2029}\u{fff9}-\u{fffb}]`,
    // Invisible characters.
    String.raw`[\u{ad}\u{34f}\u{115f}\u{1160}\u{17b4}\u{17b5}\u{180b}-\u{180f}\u{200b}-\u{200d}\u{2060}-\u{2065}\u{206a}-\u{206f}]`,
    String.raw`[\u{2800}\u{3164}\u{fe00}-\u{fe0f}\u{feff}\u{ffa0}\u{fff0}-\u{fff8}]`,
    String.raw`[\u{1bca0}-\u{1bca3}\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}]`,
    // Private use: each font shows another sign, or none. Lone surrogates.
    String.raw`[\u{e000}-\u{f8ff}\u{f0000}-\u{10ffff}\u{d800}-\u{dfff}]`,
  ].join("|"),
  "u",
);

/** The text with each such character written out, as `\u202e`: whoever decides about a text must see all of it. */
export function writtenOut(text: string): string {
  if (!UNSEEN.test(text)) return text;
  return Array.from(text.replaceAll("\r\n", "\n"), (one) => (UNSEEN.test(one) ? escape(one) : one)).join("");
}

function escape(character: string): string {
  const code = (character.codePointAt(0) ?? 0).toString(16);
  return code.length > 4 ? `\\U${code.padStart(8, "0")}` : `\\u${code.padStart(4, "0")}`;
}

/** Each of these characters in a value, written out, once and in order. */
export function unseenIn(value: unknown): string[] {
  const found = textsIn(value).flatMap((text) => Array.from(text.replaceAll("\r\n", "\n")).filter((one) => UNSEEN.test(one)));
  return [...new Set(found)].map(escape);
}

function textsIn(value: unknown): string[] {
  if (typeof value === "string") return [value];
  if (typeof value !== "object" || value === null) return [];
  return Object.values(value).flatMap(textsIn);
}
