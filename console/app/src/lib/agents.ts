/** The parts of an agent's page, as its address names them. */
export const AGENT_PARTS = ["definition", "sources", "memory", "history"] as const;
export type AgentPart = (typeof AGENT_PARTS)[number];
