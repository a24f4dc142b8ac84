/** Overview: objectives, what needs attention, queues, workers, and runs as points. */

import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate } from "@tanstack/react-router";
import { api } from "../api";
import { Scatter, type Point } from "../components/drawings";
import { depthOf, DepthBar } from "../components/operation-parts";
import { Command, Empty, Failure, Loading, SameElsewhere, Status } from "../components/parts";
import { between, duration, useTimes } from "../format";
import { commands } from "../lib/commands";
import { STUCK_AFTER_S, stuckOf } from "../lib/stuck";
import { interval, POLL_SLOW_MS, useQueues, useWorkers } from "../live";
import { useTexts } from "../texts";

const SHOWN_MAX = 200;

export function Overview() {
  const t = useTexts();
  return (
    <>
      <div className="page-head">
        <h1>{t("overview.title")}</h1>
      </div>
      <Attention />
      <Objectives />
      <div className="columns">
        <div>
          <Causes />
          <Workers />
        </div>
        <div>
          <RunPoints />
          <Queues />
        </div>
      </div>
      <SameElsewhere commands={commands({ trellis: ["slo"], address: "/slo", python: "print(client.system.slo())" })} />
    </>
  );
}

function Objectives() {
  const t = useTexts();
  const slo = useQuery({ queryKey: ["slo"], queryFn: ({ signal }) => api.get("/slo", { signal }), refetchInterval: POLL_SLOW_MS });
  if (slo.data === undefined) return slo.isPending ? <Loading /> : <Failure error={slo.error} retry={() => void slo.refetch()} />;
  const shown = (value: number | null, unit: string) =>
    value === null ? t("overview.slo.nodata") : unit === "ratio" ? `${Number((value * 100).toFixed(1))} %` : duration(value);
  return (
    <section className="cards" aria-label={t("overview.slo")}>
      {slo.data.items.map((one) => (
        <div key={one.name} className={`tile ${one.status.replace(" ", "-")}`}>
          <div className="tile-title">{one.title}</div>
          <div className="tile-value">{shown(one.value, one.unit)}</div>
          <div className="quiet">
            {one.goal === "above" ? "> " : "< "}
            {shown(one.target, one.unit)} · {t("overview.slo.samples", { n: one.samples })}
          </div>
        </div>
      ))}
    </section>
  );
}

/** How many things need somebody, each leading to its screen. */
function Attention() {
  const t = useTexts();
  const alerts = useAlerts();
  const waiting = useQuery({
    queryKey: ["proposals", "pending", "count"],
    queryFn: ({ signal }) => api.get("/proposals", { query: { status: "pending", limit: SHOWN_MAX }, signal }),
    refetchInterval: () => interval(false),
  });
  const dead = useQuery({
    queryKey: ["dead-letters", "count"],
    queryFn: ({ signal }) => api.get("/dlq", { query: { limit: SHOWN_MAX }, signal }),
    refetchInterval: () => interval(false),
  });
  const stuck = useStuck();
  const tiles = [
    { to: "/console/alerts", title: t("overview.tile.alerts"), n: alerts.data?.items.length, more: false, kind: "urgent" },
    { to: "/console/workers", title: t("overview.tile.stuck"), n: stuck?.reduce((sum, one) => sum + one.jobs, 0), more: false, kind: "urgent" },
    { to: "/console/dead-letters", title: t("overview.attention.dead"), n: dead.data?.items.length, more: dead.data?.next_cursor != null, kind: "attention" },
    { to: "/console/proposals", title: t("overview.attention.proposals"), n: waiting.data?.items.length, more: waiting.data?.next_cursor != null, kind: "attention" },
  ] as const;
  return (
    <section className="cards" aria-label={t("overview.attention")}>
      {tiles.map((one) => (
        <Link key={one.to} to={one.to} className={`tile ${one.n === undefined ? "" : one.n > 0 ? one.kind : "met"}`}>
          <span className="tile-title">{one.title}</span>
          <span className="tile-value">
            {one.n ?? "–"}
            {one.more && "+"}
          </span>
        </Link>
      ))}
    </section>
  );
}

function useAlerts() {
  return useQuery({ queryKey: ["alerts"], queryFn: ({ signal }) => api.get("/alerts", { query: { open: true }, signal }), refetchInterval: POLL_SLOW_MS });
}

function useStuck() {
  const queues = useQueues();
  const workers = useWorkers();
  return queues.data === undefined || workers.data === undefined ? undefined : stuckOf(queues.data.items, workers.data.items);
}

/** What each alert and each queue that does not move is about, and what to do. */
function Causes() {
  const t = useTexts();
  const { ago } = useTimes();
  const alerts = useAlerts();
  const stuck = useStuck() ?? [];
  const isQuiet = alerts.data?.items.length === 0 && stuck.length === 0;
  return (
    <section className="card">
      <h2>{t("overview.attention")}</h2>
      {alerts.error !== null && <Failure error={alerts.error} retry={() => void alerts.refetch()} />}
      {isQuiet && <p className="quiet">{t("overview.attention.none")}</p>}
      <ul className="causes">
        {(alerts.data?.items ?? []).map((one) => (
          <li key={one.id}>
            <Link to="/console/alerts" className="badge bad">
              {one.name}
            </Link>{" "}
            {one.text}{" "}
            <span className="quiet">
              {ago(one.raised_at)}. {one.action}
            </span>
          </li>
        ))}
        {stuck.map((one) => (
          <li key={`${one.why}-${one.name}`}>
            <Link to="/console/workers" className="badge warn">
              {t("overview.stuck")}
            </Link>{" "}
            <code>{one.name}</code> {t(`overview.stuck.${one.why}`, { n: one.jobs, time: duration(one.seconds) })}
          </li>
        ))}
      </ul>
    </section>
  );
}

function Queues() {
  const t = useTexts();
  const queues = useQueues();
  const deepest = Math.max(1, ...(queues.data?.items ?? []).map(depthOf));
  return (
    <section className="card">
      <h2>{t("overview.queues")}</h2>
      {queues.data === undefined ? (
        queues.isPending ? <Loading /> : <Failure error={queues.error} retry={() => void queues.refetch()} />
      ) : queues.data.items.length === 0 ? (
        <Empty title={t("overview.queues.empty")} command="trellis submit greet world" />
      ) : (
        <div className="scroll-x" tabIndex={0} role="group" aria-label={t("overview.queues")}>
          <table>
            <thead>
              <tr>
                <th>{t("queue.type")}</th>
                <th>{t("workers.depth")}</th>
                <th className="num">{t("queue.ready")}</th>
                <th className="num">{t("queue.scheduled")}</th>
                <th className="num">{t("queue.blocked")}</th>
                <th className="num">{t("queue.held")}</th>
                <th className="num">{t("queue.oldest")}</th>
              </tr>
            </thead>
            <tbody>
              {queues.data.items.map((one) => (
                <tr key={`${one.lifecycle}-${one.type}`}>
                  <td>
                    <code>{one.type}</code> {one.paused && <span className="badge warn">{t("queue.paused")}</span>}
                  </td>
                  <td>
                    <DepthBar queue={one} deepest={deepest} />
                  </td>
                  <td className="num">{one.ready}</td>
                  <td className="num">{one.scheduled}</td>
                  <td className="num">{one.blocked}</td>
                  <td className="num">{one.held}</td>
                  <td className={`num nowrap${(one.oldest_ready_s ?? 0) > STUCK_AFTER_S ? " late" : ""}`}>
                    {one.oldest_ready_s === null ? "–" : duration(one.oldest_ready_s)}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

function Workers() {
  const t = useTexts();
  const { ago } = useTimes();
  const workers = useWorkers();
  return (
    <section className="card">
      <h2>{t("overview.workers")}</h2>
      {workers.data === undefined ? (
        workers.isPending ? <Loading /> : <Failure error={workers.error} retry={() => void workers.refetch()} />
      ) : workers.data.items.length === 0 ? (
        <>
          <p className="quiet">{t("overview.workers.none")}</p>
          <Command text="trellis worker MODULE:APP" />
        </>
      ) : (
        <div className="scroll-x" tabIndex={0} role="group" aria-label={t("overview.workers")}>
          <table>
            <thead>
              <tr>
                <th>{t("worker.name")}</th>
                <th>{t("worker.state")}</th>
                <th className="num">{t("queue.held")}</th>
                <th>{t("worker.seen")}</th>
              </tr>
            </thead>
            <tbody>
              {workers.data.items.map((one) => (
                <tr key={one.name}>
                  <td className="mono">{one.name}</td>
                  <td>
                    <Status value={one.state} />
                  </td>
                  <td className="num">{one.held}</td>
                  <td>{ago(one.seen_at)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

function RunPoints() {
  const t = useTexts();
  const navigate = useNavigate();
  const runs = useQuery({
    queryKey: ["runs", "points"],
    queryFn: ({ signal }) => api.get("/runs", { query: { limit: SHOWN_MAX, archived: true }, signal }),
    refetchInterval: () => interval(false),
  });
  const points = (runs.data?.items ?? []).map((one): Point => {
    const seconds = between(one.created_at, one.updated_at);
    const kind = one.status === "completed" ? "good" : "bad";
    return { id: one.run_id, at: Date.parse(one.created_at), seconds, kind, title: `${one.run_id}: ${one.status}, ${duration(seconds)}` };
  });
  return (
    <section className="card">
      <h2>{t("overview.scatter")}</h2>
      {runs.data === undefined ? (
        runs.isPending ? <Loading /> : <Failure error={runs.error} retry={() => void runs.refetch()} />
      ) : points.length === 0 ? (
        <p className="quiet">{t("overview.scatter.none")}</p>
      ) : (
        <Scatter points={points} label={t("overview.scatter")} onOpen={(id) => void navigate({ to: "/console/runs/$runId", params: { runId: id } })} />
      )}
    </section>
  );
}
