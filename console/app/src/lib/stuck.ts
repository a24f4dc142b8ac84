/** Which queues do not move, and why. */

export interface QueueState {
  type: string;
  lifecycle: string;
  ready: number;
  held: number;
  paused: boolean;
  oldest_ready_s: number | null;
}

export interface WorkerState {
  name: string;
  state: string;
  held: number;
  info?: unknown;
}

export type StuckWhy = "paused" | "no-worker" | "slow" | "silent";

export interface Stuck {
  /** A job type, or the name of a worker that is silent. */
  name: string;
  why: StuckWhy;
  jobs: number;
  /** How long the oldest has waited; null for a silent worker. */
  seconds: number | null;
}

/** A job that is ready for longer than this is stuck: workers take what is ready within seconds. */
export const STUCK_AFTER_S = 300;
/** Lifecycles whose jobs workers take. The services of an instance take the others. */
const TAKEN_BY_WORKERS = new Set(["leased-job", "bus-job"]);

/** The job types that a worker says it serves. */
export function servedBy(info: unknown): string[] {
  const types = typeof info === "object" && info !== null ? (info as { types?: unknown }).types : undefined;
  return Array.isArray(types) ? types.map(String) : [];
}

export function stuckOf(queues: readonly QueueState[], workers: readonly WorkerState[]): Stuck[] {
  const served = new Set(workers.filter((one) => one.state === "alive").flatMap((one) => servedBy(one.info)));
  const found: Stuck[] = [];
  for (const queue of queues) {
    if (queue.ready === 0) continue;
    const nobody = TAKEN_BY_WORKERS.has(queue.lifecycle) && !served.has(queue.type);
    const why = queue.paused ? "paused" : nobody ? "no-worker" : (queue.oldest_ready_s ?? 0) > STUCK_AFTER_S ? "slow" : null;
    if (why !== null) found.push({ name: queue.type, why, jobs: queue.ready, seconds: queue.oldest_ready_s });
  }
  for (const worker of workers) {
    if (worker.state === "silent" && worker.held > 0) found.push({ name: worker.name, why: "silent", jobs: worker.held, seconds: null });
  }
  return found.sort((a, b) => (b.seconds ?? 0) - (a.seconds ?? 0));
}
