/** Drawings made by hand in SVG: the timeline, the lifecycle, and runs as points. */

import { duration, useTimes } from "../format";
import { diagramOf, movesFrom, pathOf, type Lifecycle } from "../lib/lifecycle";
import type { Timeline } from "../lib/timeline";
import { session } from "../session";
import { useStore } from "../store";
import { useTexts } from "../texts";

const LABEL_PX = 130;
const WIDTH_PX = 860;
const ROW_PX = 26;

export function TimelineDrawing({ timeline }: { timeline: Timeline }) {
  const t = useTexts();
  const span = timeline.to - timeline.from;
  const scale = (WIDTH_PX - LABEL_PX - 70) / span;
  const height = timeline.rows.length * ROW_PX + 26;
  const name = (label: string) => (label.startsWith("#") ? t("run.attempt", { n: label.slice(1) }) : label);
  return (
    <>
      <div className="scroll-x" tabIndex={0} role="group" aria-label={t("run.timeline")}>
        <svg viewBox={`0 0 ${WIDTH_PX} ${height}`} width={WIDTH_PX} height={height} role="img" aria-label={t("run.timeline")}>
          {[0, 0.25, 0.5, 0.75, 1].map((part) => {
            const x = LABEL_PX + part * span * scale;
            return (
              <g key={part}>
                <line className="axis" x1={x} x2={x} y1={4} y2={height - 20} />
                <text className="label" x={x} y={height - 5} textAnchor="middle">
                  {duration((part * span) / 1_000)}
                </text>
              </g>
            );
          })}
          {timeline.rows.map((row, at) => (
            <g key={`${row.label}-${at}`}>
              <text x={LABEL_PX - 10} y={at * ROW_PX + 18} textAnchor="end">
                {name(row.label)}
              </text>
              {row.bars.map((bar) => (
                <rect
                  key={`${bar.kind}-${bar.from}`}
                  className={`bar-${bar.kind}${bar.open ? " bar-open" : ""}`}
                  x={LABEL_PX + (bar.from - timeline.from) * scale}
                  y={at * ROW_PX + 6}
                  width={Math.max(2, (bar.to - bar.from) * scale)}
                  height={(row.calls?.length ?? 0) > 0 ? 10 : 16}
                  rx={3}
                >
                  <title>{`${bar.label}: ${duration((bar.to - bar.from) / 1_000)}`}</title>
                </rect>
              ))}
              {(row.calls ?? []).map((call, place) => (
                <rect
                  key={place}
                  className={`call-${call.outcome === "ok" ? call.kind : "failed"}`}
                  x={LABEL_PX + (call.from - timeline.from) * scale}
                  y={at * ROW_PX + 18}
                  width={Math.max(1, (call.to - call.from) * scale)}
                  height={5}
                >
                  <title>{`${call.name}: ${duration(call.ms / 1_000)}, ${call.outcome}`}</title>
                </rect>
              ))}
            </g>
          ))}
        </svg>
      </div>
      <div className="legend">
        {(["wait", "run", "backoff", "step"] as const).map((kind) => (
          <span key={kind}>
            <svg width="12" height="12" aria-hidden="true">
              <rect className={`bar-${kind}`} width="12" height="12" rx="3" />
            </svg>{" "}
            {t(`run.timeline.${kind}`)}
          </span>
        ))}
        {[...new Set(timeline.rows.flatMap((row) => row.calls ?? []).map((call) => call.kind))].map((kind) => (
          <span key={kind}>
            <svg width="12" height="12" aria-hidden="true">
              <rect className={`call-${kind}`} y="4" width="12" height="5" />
            </svg>{" "}
            {kind}
          </span>
        ))}
      </div>
    </>
  );
}

const BOX_W = 128;
const BOX_H = 34;
const GAP_X = 70;
const GAP_Y = 26;

/** States and moves; the way that was taken and the present state stand out. */
export function LifecycleDrawing({
  lifecycle,
  state,
  events,
}: {
  lifecycle: Lifecycle;
  state: string;
  events: readonly { payload: { [name: string]: unknown } }[];
}) {
  const t = useTexts();
  const diagram = diagramOf(lifecycle);
  const taken = pathOf(events);
  const visited = new Set(events.map((one) => String(one.payload["to"] ?? "")));
  const at = new Map(diagram.boxes.map((box) => [box.state, box]));
  const left = (column: number) => 6 + column * (BOX_W + GAP_X);
  const top = (row: number) => 30 + row * (BOX_H + GAP_Y);
  const width = left(diagram.columns - 1) + BOX_W + 6;
  const height = top(diagram.rows - 1) + BOX_H + 34;
  const edges = [...diagram.edges].sort((a, b) => Number(taken.has(key(a))) - Number(taken.has(key(b))));
  return (
    <div className="scroll-x" tabIndex={0} role="group" aria-label={t("run.lifecycle")}>
      <svg viewBox={`0 0 ${width} ${height}`} width={width} height={height} role="img" aria-label={`${lifecycle.name}: ${state}`}>
        {edges.map((edge) => {
          const from = at.get(edge.source);
          const to = at.get(edge.target);
          if (from === undefined || to === undefined) return null;
          const isTaken = taken.has(key(edge));
          const forward = to.column > from.column;
          const same = to.column === from.column;
          const [x1, y1] = [left(from.column) + (forward ? BOX_W : same ? BOX_W / 2 : 0), top(from.row) + (same ? (to.row > from.row ? BOX_H : 0) : BOX_H / 2)];
          const [x2, y2] = [left(to.column) + (forward ? 0 : same ? BOX_W / 2 : BOX_W), top(to.row) + (same ? (to.row > from.row ? 0 : BOX_H) : BOX_H / 2)];
          const far = Math.abs(to.column - from.column) > 1;
          const middle = left(from.column) + BOX_W / 2;
          const over = top(Math.min(from.row, to.row)) - 22;
          const path = same
            ? `M${x1} ${y1} L${x2} ${y2}`
            : far
              ? to.row > from.row
                ? `M${middle} ${top(from.row) + BOX_H} C${middle} ${y2}, ${middle} ${y2}, ${x2} ${y2}`
                : `M${middle} ${top(from.row)} C${middle} ${over}, ${x2 - 60} ${over}, ${x2} ${y2}`
              : `M${x1} ${y1} C${(x1 + x2) / 2} ${y1}, ${(x1 + x2) / 2} ${y2}, ${x2} ${y2}`;
          const tip = same
            ? to.row > from.row
              ? `${x2},${y2} ${x2 - 4},${y2 - 7} ${x2 + 4},${y2 - 7}`
              : `${x2},${y2} ${x2 - 4},${y2 + 7} ${x2 + 4},${y2 + 7}`
            : forward
              ? `${x2},${y2} ${x2 - 7},${y2 - 4} ${x2 - 7},${y2 + 4}`
              : `${x2},${y2} ${x2 + 7},${y2 - 4} ${x2 + 7},${y2 + 4}`;
          return (
            <g key={key(edge)}>
              <path className={`edge${isTaken ? " taken" : ""}`} d={path}>
                <title>{`${edge.source} → ${edge.target}: ${edge.triggers.join(", ")}`}</title>
              </path>
              <polygon className={`arrow${isTaken ? " taken" : ""}`} points={tip} />
            </g>
          );
        })}
        {diagram.boxes.map((box) => (
          <g key={box.state}>
            <rect
              className={`state-box${visited.has(box.state) ? " visited" : ""}${box.state === state ? " current" : ""}`}
              x={left(box.column)}
              y={top(box.row)}
              width={BOX_W}
              height={BOX_H}
              rx={8}
            />
            <text x={left(box.column) + BOX_W / 2} y={top(box.row) + BOX_H / 2 + 4} textAnchor="middle">
              {box.state}
            </text>
          </g>
        ))}
      </svg>
    </div>
  );
}

const key = (edge: { source: string; target: string }) => `${edge.source}\n${edge.target}`;

/** The legal moves from here, and who may make them. */
export function Moves({ lifecycle, state }: { lifecycle: Lifecycle; state: string }) {
  const t = useTexts();
  const mine = new Set(useStore(session)?.roles);
  const moves = movesFrom(lifecycle, state);
  if (moves.length === 0) return <p className="quiet">{t("run.moves.none")}</p>;
  return (
    <div className="scroll-x" tabIndex={0} role="group" aria-label={t("run.moves")}>
      <table>
        <thead>
          <tr>
            <th>{t("run.moves.trigger")}</th>
            <th>{t("run.moves.target")}</th>
            <th>{t("run.moves.actors")}</th>
          </tr>
        </thead>
        <tbody>
          {moves.map((move) => (
            <tr key={`${move.trigger}-${move.target}`}>
              <td className="mono">{move.trigger}</td>
              <td className="mono">{move.target}</td>
              <td>
                {move.actors.map((actor) => (
                  <span key={actor} className={`badge ${mine.has(actor) ? "good" : ""}`}>
                    {actor}
                  </span>
                ))}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export interface Point {
  id: string;
  at: number;
  seconds: number;
  kind: "good" | "bad" | "info";
  title: string;
}

/** Runs by start and duration; the scale of durations is logarithmic, so that short and long ones are both seen. */
export function Scatter({ points, onOpen, label }: { points: Point[]; onOpen: (id: string) => void; label: string }) {
  const { full } = useTimes();
  const [width, height, edge] = [620, 220, 52];
  const from = Math.min(...points.map((one) => one.at));
  const to = Math.max(...points.map((one) => one.at), from + 60_000);
  const low = Math.log10(Math.max(0.05, Math.min(...points.map((one) => one.seconds))) * 0.7);
  const high = Math.log10(Math.max(1, ...points.map((one) => one.seconds)) * 1.5);
  const x = (at: number) => edge + ((at - from) / (to - from)) * (width - edge - 16);
  const y = (seconds: number) => height - 26 - ((Math.log10(Math.max(seconds, 0.05)) - low) / (high - low || 1)) * (height - 44);
  const ticks = [0.1, 1, 10, 60, 600, 3_600].filter((one) => Math.log10(one) >= low && Math.log10(one) <= high);
  return (
    <div className="scroll-x" tabIndex={0} role="group" aria-label={label}>
      <svg viewBox={`0 0 ${width} ${height}`} width={width} height={height} role="img" aria-label={label}>
        {ticks.map((one) => (
          <g key={one}>
            <line className="axis" x1={edge} x2={width - 8} y1={y(one)} y2={y(one)} />
            <text className="label" x={edge - 6} y={y(one) + 4} textAnchor="end">
              {duration(one)}
            </text>
          </g>
        ))}
        <text className="label" x={edge} y={height - 6}>
          {full(new Date(from).toISOString())}
        </text>
        <text className="label" x={width - 8} y={height - 6} textAnchor="end">
          {full(new Date(to).toISOString())}
        </text>
        {points.map((one) => (
          <circle key={one.id} className={`point-${one.kind}`} cx={x(one.at)} cy={y(one.seconds)} r={5} opacity={0.8} onClick={() => onOpen(one.id)}>
            <title>{one.title}</title>
          </circle>
        ))}
      </svg>
    </div>
  );
}
