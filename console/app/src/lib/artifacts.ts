/** What artifacts contain, by type. The gateway checks the content when an artifact is staged; here it is only read. */

import type { Artifact } from "../api";

export interface Section {
  heading: string;
  body: string;
  sources: string[];
}

export interface ResearchBrief {
  title: string;
  summary: string;
  sections: Section[];
  conclusions: string[];
  open_questions: string[];
}

export interface Brief {
  title: string;
  body: string;
  entity_map: Record<string, string>;
  word_count: number;
}

export interface Issue {
  field: string;
  severity: "info" | "warning" | "error";
  message: string;
}

export interface EntityMatch {
  text: string;
  entity_id: string;
  confidence: number;
}

export interface PreprocessedProposal {
  original: Record<string, unknown>;
  enriched: Record<string, unknown>;
  issues: Issue[];
  entity_matches: EntityMatch[];
}

export type Content =
  | { type: "RESEARCH_BRIEF"; content: ResearchBrief }
  | { type: "BRIEF"; content: Brief }
  | { type: "PREPROCESSED_PROPOSAL"; content: PreprocessedProposal };

export const ARTIFACT_TYPES = ["RESEARCH_BRIEF", "BRIEF", "PREPROCESSED_PROPOSAL"] as const;

/** The content with its type; null for a type that this console does not know. */
export function contentOf(artifact: Pick<Artifact, "type" | "content">): Content | null {
  const known = ARTIFACT_TYPES.find((one) => one === artifact.type);
  return known === undefined ? null : ({ type: known, content: artifact.content } as unknown as Content);
}

export function titleOf(artifact: Pick<Artifact, "type" | "content" | "artifact_id">): string {
  const title = artifact.content["title"];
  return typeof title === "string" && title !== "" ? title : artifact.artifact_id;
}

/** An artifact as text, so that two can be compared line by line. */
export function asText(artifact: Pick<Artifact, "type" | "content" | "sources">): string {
  const sources = artifact.sources.map((one) => `> ${one.excerpt}\n> (${one.ref})`);
  return [...body(artifact), ...sources].join("\n\n");
}

function body(artifact: Pick<Artifact, "type" | "content">): string[] {
  const known = contentOf(artifact);
  if (known?.type === "RESEARCH_BRIEF") {
    const { title, summary, sections, conclusions, open_questions } = known.content;
    const parts = sections.map((one) => `## ${one.heading}\n${one.body}\n${one.sources.map((ref) => `[${ref}]`).join(" ")}`);
    return [`# ${title}`, summary, ...parts, ...conclusions.map((one) => `- ${one}`), ...open_questions.map((one) => `? ${one}`)];
  }
  if (known?.type === "BRIEF") {
    const { title, body: text, entity_map } = known.content;
    return [`# ${title}`, text, ...Object.entries(entity_map).map(([slug, name]) => `${slug}: ${name}`)];
  }
  return [readable(known?.type === "PREPROCESSED_PROPOSAL" ? known.content : artifact.content)];
}

/** A value as lines: one field each, in the order of their names, so that equal values give equal lines. */
export function readable(value: unknown): string {
  return JSON.stringify(value, (_, one: unknown) => (isRecord(one) ? Object.fromEntries(Object.entries(one).sort(([a], [b]) => (a < b ? -1 : 1))) : one), 2);
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** The number of a context, from the address at which the gateway has it: `…/jobs/ID/context/3`. */
export function epochOf(address: string | null | undefined): number | null {
  const found = /\/context\/(\d{1,15})$/.exec(address ?? "");
  return found === null ? null : Number(found[1]);
}
