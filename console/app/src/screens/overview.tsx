/** Overview: objectives, what needs attention, queues, workers, and runs as points. */

import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate } from "@tanstack/react-router";
import { api } from "../api";
import { Scatter, type Point } from "../components/drawings";
import { Command, Empty, Failure, Loading, SameElsewhere, Status } from "../components/parts";
import { between, duration, useTimes } from "../format";
import { commands } from "../lib/commands";
import { interval, POLL_SLOW_MS } from "../live";
import { useTexts } from "../texts";

const SHOWN_MAX = 200;

export function Overview() {
  const t = useTexts();
  return (
    <>
      <div className="page-head">
        <h1>{t("overview.title")}</h1>
      </div>
      <Objectives />
      <div className="columns">
        <div>
          <Attention />
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

function Attention() {
  const t = useTexts();
  const { ago } = useTimes();
  const alerts = useQuery({ queryKey: ["alerts"], queryFn: ({ signal }) => api.get("/alerts", { query: { open: true }, signal }), refetchInterval: POLL_SLOW_MS });
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
  const count = (page: { items: unknown[]; next_cursor: string | null } | undefined) =>
    page === undefined ? 0 : page.items.length;
  const more = (page: { next_cursor: string | null } | undefined) => (page?.next_cursor == null ? "" : "+");
  const isQuiet = alerts.data?.items.length === 0 && count(waiting.data) === 0 && count(dead.data) === 0;
  return (
    <section className="card">
      <h2>{t("overview.attention")}</h2>
      {alerts.error !== null && <Failure error={alerts.error} retry={() => void alerts.refetch()} />}
      {isQuiet && <p className="quiet">{t("overview.attention.none")}</p>}
      <ul>
        {count(waiting.data) > 0 && (
          <li>
            <Link to="/console/proposals">{t("overview.attention.proposals")}</Link>{" "}
            <span className="count">
              {count(waiting.data)}
              {more(waiting.data)}
            </span>
          </li>
        )}
        {count(dead.data) > 0 && (
          <li>
            <Link to="/console/dead-letters">{t("overview.attention.dead")}</Link>{" "}
            <span className="count">
              {count(dead.data)}
              {more(dead.data)}
            </span>
          </li>
        )}
        {(alerts.data?.items ?? []).map((one) => (
          <li key={one.id}>
            <span className="badge bad">{one.name}</span> {one.text}{" "}
            <span className="quiet">
              {ago(one.raised_at)}. {one.action}
            </span>
          </li>
        ))}
      </ul>
    </section>
  );
}

function Queues() {
  const t = useTexts();
  const queues = useQuery({ queryKey: ["queues"], queryFn: ({ signal }) => api.get("/queues", { signal }), refetchInterval: 5_000 });
  return (
    <section className="card">
      <h2>{t("overview.queues")}</h2>
      {queues.data === undefined ? (
        queues.isPending ? <Loading /> : <Failure error={queues.error} retry={() => void queues.refetch()} />
      ) : queues.data.items.length === 0 ? (
        <Empty title={t("overview.queues.empty")} command="trellis submit greet world" />
      ) : (
        <div className="scroll-x">
          <table>
            <thead>
              <tr>
                <th>{t("queue.type")}</th>
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
                  <td className="num">{one.ready}</td>
                  <td className="num">{one.scheduled}</td>
                  <td className="num">{one.blocked}</td>
                  <td className="num">{one.held}</td>
                  <td className="num">{one.oldest_ready_s === null ? "–" : duration(one.oldest_ready_s)}</td>
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
  const workers = useQuery({ queryKey: ["workers"], queryFn: ({ signal }) => api.get("/workers", { signal }), refetchInterval: 5_000 });
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
        <div className="scroll-x">
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
