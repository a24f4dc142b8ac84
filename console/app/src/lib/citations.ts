/** Citations: an excerpt, and where its source has it. */

export interface Citation {
  ref: string;
  excerpt: string;
  start?: number;
  end?: number;
}

/** The parts of a text before, in and behind a passage. */
export interface Passage {
  before: string;
  found: string;
  after: string;
}

/** Where the excerpt is in the source. Positions count code points, as Python does. */
export function locate(text: string, citation: Citation): Passage | null {
  const points = Array.from(text);
  const { start, end } = citation;
  if (start !== undefined && end !== undefined && points.slice(start, end).join("") === citation.excerpt) {
    return { before: points.slice(0, start).join(""), found: citation.excerpt, after: points.slice(end).join("") };
  }
  const at = text.indexOf(citation.excerpt);
  if (at < 0 || citation.excerpt === "") return null;
  return { before: text.slice(0, at), found: citation.excerpt, after: text.slice(at + citation.excerpt.length) };
}

export type CitationState = "verified" | "unverified" | "unchecked";

/** Whether the source has the excerpt word for word; `unchecked` where there is no text to compare it with. */
export function stateOf(citation: Citation, sources: ReadonlyMap<string, string>): CitationState {
  const text = sources.get(citation.ref);
  if (text === undefined) return "unchecked";
  return locate(text, citation) === null ? "unverified" : "verified";
}
