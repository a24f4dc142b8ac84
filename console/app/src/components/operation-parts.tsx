/** Parts of the screens for operators: bars, and queries that show why they have nothing. */

import type { ReactNode } from "react";
import type { QueueListed } from "../api";
import { duration } from "../format";
import { STUCK_AFTER_S } from "../lib/stuck";
import { useTexts, type Translate } from "../texts";
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

export interface DataColumn<T> {
  title: ReactNode;
  cell: (row: T) => ReactNode;
  /** Classes of its cells; with `num` its title stands at the right, too. */
  kind?: string;
  /** A further class of the cell of this row. */
  markOf?: (row: T) => string;
}

/** A table of all its rows, for lists that are short; `PagedTable` is for long ones. */
export function DataTable<T>({ label, columns, rows, keyOf }: { label: string; columns: readonly DataColumn<T>[]; rows: readonly T[]; keyOf: (row: T) => string }) {
  return (
    <Scroll label={label}>
      <table>
        <thead>
          <tr>
            {columns.map((column, at) => (
              <th key={at} className={column.kind?.startsWith("num") === true ? "num" : undefined}>
                {column.title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={keyOf(row)}>
              {columns.map((column, at) => (
                <td key={at} className={[column.kind, column.markOf?.(row)].filter(Boolean).join(" ") || undefined}>
                  {column.cell(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

/** A column of buttons: its title is only for readers of screens. */
export function ActTitle() {
  return <span className="hidden">{useTexts()("workers.act")}</span>;
}

/** The columns of queues on every screen that lists them. */
export function queueColumns(t: Translate, deepest: number): { name: DataColumn<QueueListed>; depths: DataColumn<QueueListed>[] } {
  const late = (one: QueueListed) => ((one.oldest_ready_s ?? 0) > STUCK_AFTER_S ? "late" : "");
  return {
    name: {
      title: t("queue.type"),
      cell: (one) => (
        <>
          <code>{one.type}</code> <span className="quiet">{one.lifecycle}</span> {one.paused && <span className="badge warn">{t("queue.paused")}</span>}
        </>
      ),
    },
    depths: [
      { title: t("workers.depth"), cell: (one) => <DepthBar queue={one} deepest={deepest} /> },
      { title: t("queue.ready"), kind: "num", cell: (one) => one.ready },
      { title: t("queue.scheduled"), kind: "num", cell: (one) => one.scheduled },
      { title: t("queue.blocked"), kind: "num", cell: (one) => one.blocked },
      { title: t("queue.held"), kind: "num", cell: (one) => one.held },
      { title: t("queue.oldest"), kind: "num nowrap", markOf: late, cell: (one) => (one.oldest_ready_s === null ? "–" : duration(one.oldest_ready_s)) },
    ],
  };
}

export function queueKey(one: QueueListed): string {
  return `${one.lifecycle}-${one.type}`;
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
