/** Which role may do what, and which cell of the authority matrices decides. The gateway decides by the same table. */

export interface Rule {
  name: string;
  action: string;
  source: string;
  /** `yes`, `own` or `no` for each role. */
  grants: { [role: string]: string };
}

export interface Verdict {
  grant: "yes" | "own" | "no";
  /** The roles among those asked about whose cell decides; all of them for a refusal. */
  by: string[];
  /** The roles that have the right, at least for their own objects. */
  holders: string[];
}

/** What several roles together may do under a rule: the widest right of any of them counts. */
export function verdictOf(rule: Rule, roles: readonly string[]): Verdict {
  const holders = Object.keys(rule.grants).filter((role) => rule.grants[role] !== "no");
  for (const grant of ["yes", "own"] as const) {
    const by = roles.filter((role) => rule.grants[role] === grant);
    if (by.length > 0) return { grant, by, holders };
  }
  return { grant: "no", by: [...roles], holders };
}

/** The first word of a rule's name: jobs, artifacts, memory and so on. */
export function groupOf(rule: Rule): string {
  return rule.name.split(".")[0] ?? rule.name;
}

/** The roles of the table, in its order. */
export function rolesOf(rules: readonly Rule[]): string[] {
  return Object.keys(rules[0]?.grants ?? {});
}

/** Rules that fit what was typed: every word occurs in the name, the action or the source. */
export function rulesLike(rules: readonly Rule[], text: string): Rule[] {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return rules.filter((rule) => words.every((word) => `${rule.name} ${rule.action} ${rule.source}`.toLowerCase().includes(word)));
}
