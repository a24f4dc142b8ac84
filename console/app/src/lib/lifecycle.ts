/** Where the states of a lifecycle stand in its diagram, which moves were made, and which are legal now. */

export interface Transition {
  source: string | null;
  target: string;
  trigger: string;
  actors: string[];
  event: string;
}

export interface Lifecycle {
  name: string;
  states: string[];
  transitions: Transition[];
}

export interface Box {
  state: string;
  column: number;
  row: number;
}

export interface Edge {
  source: string;
  target: string;
  triggers: string[];
}

export interface Diagram {
  boxes: Box[];
  edges: Edge[];
  columns: number;
  rows: number;
}

export interface Move {
  trigger: string;
  target: string;
  actors: string[];
}

/** States stand in the column of their shortest way from the beginning; final states stand in the last column. */
export function diagramOf(lifecycle: Lifecycle): Diagram {
  const steps = lifecycle.transitions.filter((one) => one.source !== one.target);
  const column = new Map<string, number>();
  let reached = steps.filter((one) => one.source === null).map((one) => one.target);
  for (let depth = 0; reached.length > 0 && depth < lifecycle.states.length; depth += 1) {
    const fresh = [...new Set(reached)].filter((state) => !column.has(state));
    for (const state of fresh) column.set(state, depth);
    reached = steps.filter((one) => one.source !== null && fresh.includes(one.source)).map((one) => one.target);
  }
  const final = finalStates(lifecycle);
  const inner = lifecycle.states.filter((state) => !final.has(state));
  const last = Math.max(0, ...inner.map((state) => column.get(state) ?? 0)) + (final.size > 0 ? 1 : 0);
  const rows = new Map<number, number>();
  const boxes = lifecycle.states.map((state): Box => {
    const at = final.has(state) ? last : (column.get(state) ?? 0);
    const row = rows.get(at) ?? 0;
    rows.set(at, row + 1);
    return { state, column: at, row };
  });
  const edges = new Map<string, Edge>();
  for (const step of steps) {
    if (step.source === null) continue;
    const key = `${step.source}\n${step.target}`;
    const edge = edges.get(key) ?? { source: step.source, target: step.target, triggers: [] };
    if (!edge.triggers.includes(step.trigger)) edge.triggers.push(step.trigger);
    edges.set(key, edge);
  }
  return { boxes, edges: [...edges.values()], columns: last + 1, rows: Math.max(1, ...rows.values()) };
}

export function finalStates(lifecycle: Lifecycle): Set<string> {
  const left = new Set(lifecycle.transitions.filter((one) => one.source !== one.target).map((one) => one.source));
  return new Set(lifecycle.states.filter((state) => !left.has(state)));
}

/** The legal moves from a state: each trigger and target once, with every role that may make it. */
export function movesFrom(lifecycle: Lifecycle, state: string): Move[] {
  const moves = new Map<string, Move>();
  for (const one of lifecycle.transitions) {
    if (one.source !== state) continue;
    const key = `${one.trigger}\n${one.target}`;
    const move = moves.get(key) ?? { trigger: one.trigger, target: one.target, actors: [] };
    move.actors = [...new Set([...move.actors, ...one.actors])].sort();
    moves.set(key, move);
  }
  return [...moves.values()];
}

/** The moves that were made, as `source\ntarget`. */
export function pathOf(events: readonly { payload: { [name: string]: unknown } }[]): Set<string> {
  return new Set(
    events
      .filter((one) => one.payload["from"] != null && one.payload["from"] !== one.payload["to"])
      .map((one) => `${String(one.payload["from"])}\n${String(one.payload["to"])}`),
  );
}
