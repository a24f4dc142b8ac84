/** Parameters of a run, typed as names and values. A value is JSON if it can be read as JSON, else text: as `--param` has it. */

export interface Row {
  name: string;
  value: string;
}

/** What may keep rows from being parameters. */
export type RowProblem = "unnamed" | "twice";

export const ROWS_MAX = 50;

export function paramsOf(rows: readonly Row[]): { params: Record<string, unknown>; problem: RowProblem | null } {
  const params: Record<string, unknown> = Object.create(null) as Record<string, unknown>;
  for (const { name, value } of rows) {
    if (name.trim() === "" && value === "") continue;
    if (name.trim() === "") return { params: {}, problem: "unnamed" };
    if (name.trim() in params) return { params: {}, problem: "twice" };
    params[name.trim()] = valueOf(value);
  }
  return { params: { ...params }, problem: null };
}

/** Rows that give these parameters back. */
export function rowsOf(params: Record<string, unknown>): Row[] {
  return Object.entries(params).map(([name, value]) => ({ name, value: textOf(value) }));
}

/** The text that gives this value back on the command line. */
export function textOf(value: unknown): string {
  return typeof value === "string" && valueOf(value) === value ? value : JSON.stringify(value);
}

function valueOf(text: string): unknown {
  try {
    return JSON.parse(text) as unknown;
  } catch {
    return text;
  }
}
