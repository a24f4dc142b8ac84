/** Parts of the screens for operators: bars, and queries that show why they have nothing. */

import type { ReactNode } from "react";
import { useTexts } from "../texts";
import { Failure, Loading } from "./parts";

const BAR_W = 120;
const BAR_H = 10;

/** Amounts beside each other, drawn against a total. */
export function AmountBar({ parts, total, label }: { parts: { kind: string; value: number }[]; total: number; label: string }) {
  let x = 0;
  return (
    <svg className="amount" width={BAR_W} height={BAR_H} role="img" aria-label={label}>
      <title>{label}</title>
      <rect className="amount-none" width={BAR_W} height={BAR_H} rx={3} />
      {parts.map((part) => {
        const width = total <= 0 ? 0 : Math.min(BAR_W - x, (Math.max(0, part.value) / total) * BAR_W);
        const left = x;
        x += width;
        return width === 0 ? null : <rect key={part.kind} className={`amount-${part.kind}`} x={left} width={Math.max(2, width)} height={BAR_H} rx={3} />;
      })}
    </svg>
  );
}

interface Depth {
  held: number;
  ready: number;
  blocked: number;
  scheduled: number;
}

export function depthOf(queue: Depth): number {
  return queue.held + queue.ready + queue.blocked + queue.scheduled;
}

/** The jobs of a queue by where they are, against the deepest queue. */
export function DepthBar({ queue, deepest }: { queue: Depth; deepest: number }) {
  const t = useTexts();
  const parts = [
    { kind: "held", value: queue.held },
    { kind: "ready", value: queue.ready },
    { kind: "blocked", value: queue.blocked },
    { kind: "later", value: queue.scheduled },
  ];
  return <AmountBar parts={parts} total={deepest} label={t("workers.depth.of", { held: queue.held, ready: queue.ready, blocked: queue.blocked, later: queue.scheduled })} />;
}

/** A region that scrolls sideways on a narrow screen; the keyboard reaches it. */
export function Scroll({ label, children }: { label: string; children: ReactNode }) {
  return (
    <div className="scroll-x" tabIndex={0} role="group" aria-label={label}>
      {children}
    </div>
  );
}

/** What a query gave, or that it is still loading, or why it failed. */
export function Loaded<T>({
  query,
  children,
}: {
  query: { data: T | undefined; isPending: boolean; error: unknown; refetch: () => unknown };
  children: (data: T) => ReactNode;
}) {
  if (query.data !== undefined) return children(query.data);
  return query.isPending ? <Loading /> : <Failure error={query.error} retry={() => void query.refetch()} />;
}
