/** Overview: objectives, what needs attention, queues, workers, and runs as points. */

import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate } from "@tanstack/react-router";
import { api } from "../api";
import { Scatter, type Point } from "../components/drawings";
import { DataTable, depthOf, queueColumns, queueKey } from "../components/operation-parts";
import { Command, Empty, Failure, Loading, SameElsewhere, Status } from "../components/parts";
import { between, duration, useTimes } from "../format";
import { commands } from "../lib/commands";
import { stuckOf } from "../lib/stuck";
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
  const waiting = useWaiting();
  const stuck = useStuck();
  const tiles = [
    { to: "/console/alerts", title: t("overview.tile.alerts"), search: {}, n: alerts.data?.items.length, more: alerts.data?.items.length === SHOWN_MAX, kind: "urgent" },
    { to: "/console/workers", title: t("overview.tile.stuck"), search: {}, n: stuck?.reduce((sum, one) => sum + one.jobs, 0), more: false, kind: "urgent" },
    ...waiting.map((one) => ({ ...one, kind: "attention" })),
  ];
  return (
    <section className="cards" aria-label={t("overview.attention")}>
      {tiles.map((one) => (
        <Link key={one.title} to={one.to} search={one.search} className={`tile ${one.n === undefined ? "" : one.n > 0 ? one.kind : "met"}`}>
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

interface Waiting {
  to: string;
  search: Record<string, string>;
  title: string;
  n: number | undefined;
  more: boolean;
}

/** What waits for the decision of a person: dead letters, failed queue jobs before they are dead, and proposals. */
function useWaiting(): Waiting[] {
  const t = useTexts();
  const proposals = useQuery({
    queryKey: ["proposals", "pending", "count"],
    queryFn: ({ signal }) => api.get("/proposals", { query: { status: "pending", limit: SHOWN_MAX }, signal }),
    refetchInterval: () => interval(false),
  });
  const dead = useQuery({
    queryKey: ["dead-letters", "count"],
    queryFn: ({ signal }) => api.get("/dlq", { query: { limit: SHOWN_MAX }, signal }),
    refetchInterval: () => interval(false),
  });
  const failed = useQuery({
    queryKey: ["jobs", "failed", "count"],
    queryFn: ({ signal }) => api.get("/jobs", { query: { lifecycle: "queue-job", status: "FAILED", limit: SHOWN_MAX }, signal }),
    refetchInterval: () => interval(false),
  });
  const counted = (query: { data?: { items: unknown[]; next_cursor: string | null } | undefined }) => ({ n: query.data?.items.length, more: query.data?.next_cursor != null });
  return [
    { to: "/console/dead-letters", search: {}, title: t("overview.attention.dead"), ...counted(dead) },
    { to: "/console/jobs", search: { q: "lifecycle:queue-job status:FAILED" }, title: t("overview.attention.failed"), ...counted(failed) },
    { to: "/console/proposals", search: {}, title: t("overview.attention.proposals"), ...counted(proposals) },
  ];
}

function useAlerts() {
  return useQuery({ queryKey: ["alerts"], queryFn: ({ signal }) => api.get("/alerts", { query: { open: true, limit: SHOWN_MAX }, signal }), refetchInterval: POLL_SLOW_MS });
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
  const waiting = useWaiting();
  const isQuiet = alerts.data?.items.length === 0 && stuck.length === 0 && waiting.every((one) => one.n === 0);
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
        {waiting
          .filter((one) => (one.n ?? 0) > 0)
          .map((one) => (
            <li key={one.title}>
              <Link to={one.to} search={one.search} className="badge warn">
                {one.n}
                {one.more && "+"}
              </Link>{" "}
              {one.title}
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
  const columns = queueColumns(t, Math.max(1, ...(queues.data?.items ?? []).map(depthOf)));
  return (
    <section className="card">
      <h2>{t("overview.queues")}</h2>
      {queues.data === undefined ? (
        queues.isPending ? <Loading /> : <Failure error={queues.error} retry={() => void queues.refetch()} />
      ) : queues.data.items.length === 0 ? (
        <Empty title={t("overview.queues.empty")} command="trellis submit greet world" />
      ) : (
        <DataTable label={t("overview.queues")} columns={[columns.name, ...columns.depths]} rows={queues.data.items} keyOf={queueKey} />
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
        <DataTable
          label={t("overview.workers")}
          columns={[
            { title: t("worker.name"), kind: "mono", cell: (one) => one.name },
            { title: t("worker.state"), cell: (one) => <Status value={one.state} /> },
            { title: t("queue.held"), kind: "num", cell: (one) => one.held },
            { title: t("worker.seen"), cell: (one) => ago(one.seen_at) },
          ]}
          rows={workers.data.items}
          keyOf={(one) => one.name}
        />
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
        <>
          <Scatter points={points} label={t("overview.scatter")} onOpen={(id) => void navigate({ to: "/console/runs/$runId", params: { runId: id } })} />
          {runs.data.next_cursor !== null && <p className="quiet">{t("common.newest", { n: points.length })}</p>}
        </>
      )}
    </section>
  );
}
