/** One run: its timeline, its lifecycle with the legal next moves, its events, steps and proposals. */

import { useQuery } from "@tanstack/react-query";
import { Link, useParams } from "@tanstack/react-router";
import { ProblemError } from "@trellis/client";
import { useState } from "react";
import { api, hasEnded, type StepFile } from "../api";
import { CancelDialog } from "../components/cancel-dialog";
import { Events } from "../components/events";
import { Log } from "../components/log";
import { AmountBar, Scroll } from "../components/operation-parts";
import { LifecycleDrawing, Moves, TimelineDrawing } from "../components/drawings";
import { Failure, Json, Loading, SameElsewhere, Status } from "../components/parts";
import { between, duration, useTimes } from "../format";
import { commands, pythonLiteral } from "../lib/commands";
import { outcomeOf } from "../lib/outcome";
import { writtenOut } from "../lib/unseen";
import { callsOf, timelineOf } from "../lib/timeline";
import { interval } from "../live";
import { useTexts } from "../texts";
import { StartRun } from "./runs";

const EVENTS_SHOWN = 1_000;
const NOT_PUBLISHED_RETRY_MS = 1_000;

export function Run() {
  const t = useTexts();
  const { full } = useTimes();
  const { runId } = useParams({ from: "/console/runs/$runId" });
  const [asking, ask] = useState<"cancel" | "again" | null>(null);
  const run = useQuery({
    queryKey: ["run", runId],
    queryFn: ({ signal }) => api.get("/runs/{run_id}", { path: { run_id: runId }, signal }),
    // A run that was just started is stored before its document is published: then it is not found for a moment.
    retry: (count, error) => error instanceof ProblemError && error.status === 404 && error.document["code"] === "NOT_FOUND" && count < 5,
    retryDelay: NOT_PUBLISHED_RETRY_MS,
    refetchInterval: (query) => (hasEnded("run", query.state.data?.status) ? false : interval(true)),
  });
  const ended = hasEnded("run", run.data?.status);
  const version = run.data?.version;
  const path = { run_id: runId };
  const events = useQuery({
    queryKey: ["run", runId, "events"],
    queryFn: ({ signal }) => api.get("/events", { query: { job_id: runId, limit: EVENTS_SHOWN }, signal }),
    refetchInterval: () => (ended ? false : interval(true)),
    enabled: run.data !== undefined,
  });
  const steps = useQuery({
    queryKey: ["run", runId, "steps"],
    queryFn: ({ signal }) => api.get("/runs/{run_id}/steps", { path, signal }),
    enabled: run.data !== undefined,
  });
  const asked = useQuery({
    queryKey: ["run", runId, "request"],
    // Null when it is no longer known: that is an answer, which stays while it is asked for again.
    queryFn: ({ signal }) => api.get("/runs/{run_id}/request", { path, signal }).catch(nullIfNotFound),
    enabled: run.data !== undefined,
    staleTime: Number.POSITIVE_INFINITY,
    retry: false,
  });
  const manifest = useQuery({
    queryKey: ["run", runId, "manifest", version],
    queryFn: ({ signal }) => api.get("/runs/{run_id}/manifest", { path, signal }),
    enabled: ended,
  });
  const lifecycle = useQuery({
    queryKey: ["lifecycle", "run"],
    queryFn: ({ signal }) => api.get("/lifecycles/{name}", { path: { name: "run" }, signal }),
    staleTime: Number.POSITIVE_INFINITY,
  });
  if (run.data === undefined) {
    return run.isPending ? <Loading /> : <Failure error={run.error} retry={() => void run.refetch()} list="/console/runs" />;
  }
  const one = run.data;
  const listed = events.data?.items ?? [];
  const outcome = outcomeOf(steps.data?.items ?? []);
  const timeline = timelineOf(listed, steps.data?.items ?? [], Date.now(), ended);
  return (
    <>
      <div className="page-head">
        <h1 className="mono">{one.run_id}</h1>
        <Status value={one.status} />
        <span className="quiet">{t("run.steps.of", { done: one.steps_completed, total: one.steps_total })}</span>
        <span className="grow" />
        {!ended && (
          <button type="button" className="danger" onClick={() => ask("cancel")}>
            {t("run.cancel")}
          </button>
        )}
        <button type="button" disabled={asked.data === undefined} onClick={() => ask("again")}>
          {t("runs.again")}
        </button>
      </div>
      {asked.error !== null && <Failure error={asked.error} retry={() => void asked.refetch()} />}
      {one.error !== null && <p className="banner bad">{t("run.error", { error: one.error })}</p>}
      <section className="card">
        <dl className="facts">
          <dt>{t("runs.agent")}</dt>
          <dd>{one.agent_slug}</dd>
          <dt>{t("runs.trigger")}</dt>
          <dd>{one.trigger}</dd>
          <dt>{t("runs.started")}</dt>
          <dd>{full(one.started_at)}</dd>
          <dt>{t("runs.took")}</dt>
          <dd>{one.finished_at === null ? "…" : duration(between(one.started_at, one.finished_at))}</dd>
          {asked.data != null && Object.keys(asked.data.params).length > 0 && (
            <>
              <dt>{t("run.params")}</dt>
              <dd>
                {Object.entries(asked.data.params).map(([name, value]) => (
                  <div key={name}>
                    <code>{name}</code> = <code>{typeof value === "string" ? value : JSON.stringify(value)}</code>
                  </div>
                ))}
              </dd>
            </>
          )}
          {one.proposals_created.length > 0 && (
            <>
              <dt>{t("run.proposals")}</dt>
              <dd>
                {one.proposals_created.map((id) => (
                  <div key={id}>
                    <Link to="/console/proposals" search={{ status: "all", id }}>
                      {id}
                    </Link>
                  </div>
                ))}
              </dd>
            </>
          )}
          {outcome.summary !== null && (
            <>
              <dt>{t("run.summary")}</dt>
              <dd className="prose">{writtenOut(outcome.summary)}</dd>
            </>
          )}
          {(one.already_proposed ?? []).length > 0 && (
            <>
              <dt>{t("run.repeated")}</dt>
              <dd>
                {(one.already_proposed ?? []).map((equal, at) => (
                  <div key={at}>
                    {equal.id !== "" && (
                      <Link to="/console/proposals" search={{ status: "all", id: equal.id }}>
                        {equal.id}
                      </Link>
                    )}{" "}
                    {t("run.repeated.one", { action: equal.action, target: equal.target })} <Status value={equal.status} />
                  </div>
                ))}
              </dd>
            </>
          )}
          {outcome.refused.length > 0 && (
            <>
              <dt>{t("run.refused")}</dt>
              <dd>
                {outcome.refused.map((text, at) => (
                  <div key={at}>{writtenOut(text)}</div>
                ))}
              </dd>
            </>
          )}
          <dt>{t("nav.artifacts")}</dt>
          <dd>
            <Link to="/console/artifacts" search={{ q: `run:${one.run_id}` }}>
              {t("artifacts.of.run")}
            </Link>
          </dd>
        </dl>
      </section>
      <section className="card">
        <h2>{t("run.timeline")}</h2>
        {events.error !== null ? (
          <Failure error={events.error} retry={() => void events.refetch()} />
        ) : events.isPending ? (
          <Loading />
        ) : (
          <TimelineDrawing timeline={timeline} />
        )}
      </section>
      {lifecycle.data !== undefined && (
        <section className="card">
          <h2>{t("run.lifecycle")}</h2>
          <LifecycleDrawing lifecycle={lifecycle.data} state={one.status} events={listed} />
          <h3>{t("run.moves")}</h3>
          <Moves lifecycle={lifecycle.data} state={one.status} />
        </section>
      )}
      <section className="card">
        <h2>{t("run.events")}</h2>
        <Events items={listed} first={EVENTS_SHOWN} />
      </section>
      <section className="card">
        <h2>{t("run.steps")}</h2>
        {steps.error !== null && <Failure error={steps.error} retry={() => void steps.refetch()} />}
        {steps.data?.items.length === 0 && <p className="quiet">{t("run.steps.none")}</p>}
        {(steps.data?.items ?? []).map((step) => (
          <Step key={step.step} step={step} />
        ))}
        {manifest.data !== undefined && <Json value={manifest.data} title={t("run.manifest")} />}
        <Json value={one} title={t("common.raw")} />
      </section>
      <Log id={runId} version={version} events={listed} steps={steps.data?.items ?? []} />
      <SameElsewhere
        commands={commands({
          trellis: ["runs", "show", runId],
          address: `/runs/${runId}`,
          python: `print(client.runs.get(${pythonLiteral(runId)}))`,
        })}
      />
      {asking === "again" && <StartRun agent={one.agent_slug} given={asked.data?.params ?? null} onClose={() => ask(null)} />}
      {asking === "cancel" && <CancelDialog what="run" id={runId} onClose={() => ask(null)} />}
    </>
  );
}

function nullIfNotFound(error: unknown): null {
  if (error instanceof ProblemError && error.status === 404) return null;
  throw error;
}

/** A step: what it called and how long that took, and its file. */
function Step({ step }: { step: StepFile }) {
  const t = useTexts();
  const calls = callsOf(step);
  const longest = Math.max(1, ...calls.map((call) => call.ms));
  return (
    <details className="step">
      <summary>
        {`${step.step} ${step.name}, ${duration(between(step.started_at, step.finished_at))}`}
        {calls.length > 0 && <span className="quiet"> · {t("run.calls", { n: calls.length })}</span>}
      </summary>
      {calls.length > 0 && (
        <Scroll label={t("run.calls", { n: calls.length })}>
          <table>
            <tbody>
              {calls.map((call, at) => (
                <tr key={at}>
                  <td className="mono">{call.name}</td>
                  <td>{call.kind}</td>
                  <td className="nowrap">
                    <AmountBar parts={[{ kind: call.outcome === "ok" ? "ready" : "bad", value: call.ms }]} total={longest} label={duration(call.ms / 1_000)} />{" "}
                    {duration(call.ms / 1_000)}
                  </td>
                  <td>{call.outcome}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      <Json value={step} title={t("run.step.file")} />
    </details>
  );
}
