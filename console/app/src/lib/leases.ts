/** Leases: how long each still lasts, by the clock of the ledger. */

export interface Seen {
  seen_at: string;
  silent_s: number;
}

/** Below this many seconds a lease is drawn as one that may run out. */
export const LEASE_SHORT_S = 10;

/**
 * How far the clock of the ledger is ahead of this machine's, in milliseconds. A worker's last heartbeat and the time
 * since then, added, are the time of the ledger when it answered at `answeredAt`. Without a worker it is 0.
 */
export function clockOffset(workers: readonly Seen[], answeredAt: number): number {
  const first = workers[0];
  return first === undefined ? 0 : Date.parse(first.seen_at) + first.silent_s * 1_000 - answeredAt;
}

export type LeaseState = "good" | "warn" | "bad";

/** Seconds until a lease runs out; negative once it has. */
export function leaseLeft(expiresAt: string, now: number, offset: number): number {
  return (Date.parse(expiresAt) - now - offset) / 1_000;
}

export function leaseState(left: number): LeaseState {
  return left <= 0 ? "bad" : left < LEASE_SHORT_S ? "warn" : "good";
}
