/** Jobs of every lifecycle: the list with its filter, and one job. */

import { useInfiniteQuery, useMutation, useQuery } from "@tanstack/react-query";
import { Link, useNavigate, useParams, useSearch } from "@tanstack/react-router";
import { useCallback, useMemo, useState } from "react";
import { api, hasEnded, type JobListed } from "../api";
import { CancelDialog } from "../components/cancel-dialog";
import { JobEvents, useJobEvents } from "../components/events";
import { FilterBox } from "../components/filter-box";
import { LifecycleDrawing, Moves, TimelineDrawing } from "../components/drawings";
import { Log } from "../components/log";
import { Command, Empty, Failure, Json, Loading, SameElsewhere, Status, toast } from "../components/parts";
import { PagedTable, type Column } from "../components/table";
import { between, duration, useTimes } from "../format";
import { attempts } from "../lib/attempts";
import { commands, optionsOf, pythonArguments, pythonLiteral, typed } from "../lib/commands";
import { parseFilter, passes, valueOf, type FilterFields } from "../lib/filter";
import { rowsBy } from "../lib/pages";
import { timelineOf } from "../lib/timeline";
import { failed, interval, queries } from "../live";
import { useTexts } from "../texts";

const LIFECYCLES = ["leased-job", "queue-job", "bus-job"] as const;
/** The first page is a screenful, so that it is there at once. */
const FIRST_PAGE = 50;
const PAGE = 200;
const REQUEUEABLE = new Set(["failed", "dead_lettered", "discarded", "DEAD", "DISCARDED", "FAILED"]);

export function Jobs() {
  const t = useTexts();
  const { ago } = useTimes();
  const navigate = useNavigate();
  const { q = "" } = useSearch({ from: "/console/jobs" });
  const queues = useQuery({ queryKey: ["queues"], queryFn: ({ signal }) => api.get("/queues", { signal }), staleTime: 30_000, retry: false });
  const lifecycles = useQuery({ queryKey: ["lifecycles"], queryFn: ({ signal }) => api.get("/lifecycles", { signal }), staleTime: Number.POSITIVE_INFINITY });
  const fields: FilterFields = {
    status: {
      values: [...new Set((lifecycles.data?.items ?? []).filter((one) => LIFECYCLES.some((name) => name === one.name)).flatMap((one) => one.states))],
    },
    type: { values: (queues.data?.items ?? []).filter((one) => LIFECYCLES.some((name) => name === one.lifecycle)).map((one) => one.type) },
    lifecycle: { values: LIFECYCLES },
    parent: {},
    correlation: {},
    age: { duration: true },
  };
  const filter = parseFilter(q, fields);
  const lifecycle = LIFECYCLES.find((one) => one === valueOf(filter, "lifecycle"));
  const asked = {
    ...optional("status", fields["status"]?.values?.find((one) => one === valueOf(filter, "status"))),
    ...optional("type", valueOf(filter, "type")),
    ...optional("parent_id", valueOf(filter, "parent")),
    ...optional("correlation_id", valueOf(filter, "correlation")),
  };
  const queryKey = ["jobs", "list", lifecycle, asked];
  const listing = useInfiniteQuery({
    queryKey,
    meta: rowsBy("job_id", true),
    queryFn: ({ pageParam, signal }) =>
      api.get("/jobs", { query: { limit: pageParam === null ? FIRST_PAGE : PAGE, cursor: pageParam, ...(lifecycle ? { lifecycle } : {}), ...asked }, signal }),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor,
  });
  const rows = useMemo(
    () =>
      (listing.data?.pages ?? [])
        .flatMap((page) => page.items as JobListed[])
        .filter((one) => passes(filter, { id: one.job_id, status: one.status, lifecycle: one.lifecycle, age: between(one.created_at, Date.now()), kind: one.type })),
    // eslint-disable-next-line react-hooks/exhaustive-deps
    [listing.data, q],
  );
  const columns: Column<JobListed>[] = [
    { title: t("jobs.id"), width: "minmax(13rem, 2fr)", cell: (one) => one.job_id },
    { title: t("jobs.type"), width: "minmax(8rem, 1.4fr)", cell: (one) => one.type },
    { title: t("runs.status"), width: "8rem", cell: (one) => <Status value={one.status} /> },
    { title: t("jobs.lifecycle"), width: "8rem", cell: (one) => one.lifecycle },
    { title: t("jobs.attempt"), width: "4.5rem", cell: (one) => attempts(one) },
    { title: t("common.age"), width: "7rem", cell: (one) => ago(one.created_at) },
    { title: t("jobs.waits"), width: "minmax(8rem, 1.5fr)", cell: (one) => one.waits_for ?? "" },
  ];
  const search = useCallback(
    (text: string) => void navigate({ to: "/console/jobs", search: text === "" ? {} : { q: text }, replace: true }),
    [navigate],
  );
  return (
    <>
      <div className="page-head">
        <h1>{t("jobs.title")}</h1>
        <FilterBox value={q} onChange={search} fields={fields} filter={filter} example="status:queued type:mail.send age>5m" />
      </div>
      <PagedTable
        listing={listing}
        queryKey={queryKey}
        label={t("jobs.title")}
        rows={rows}
        columns={columns}
        keyOf={(one) => one.job_id}
        linkOf={(one) => ({ to: "/console/jobs/$jobId", params: { jobId: one.job_id } })}
        empty={q === "" ? <Empty title={t("jobs.empty")} command="trellis submit greet world" /> : <Empty title={t("jobs.empty.filter")} />}
      />
      <SameElsewhere
        commands={commands({
          trellis: ["jobs", ...optionsOf({ status: asked.status, type: asked.type, lifecycle, correlation: asked.correlation_id, parent: asked.parent_id })],
          address: `/jobs?${new URLSearchParams({ ...asked, ...(lifecycle ? { lifecycle } : {}), limit: String(PAGE) })}`,
          python: `print(client.jobs.list(${pythonArguments({ status: asked.status, type_: asked.type, lifecycle, correlation_id: asked.correlation_id, parent_id: asked.parent_id })}).items)`,
        })}
      />
    </>
  );
}

function optional<K extends string>(name: K, value: string | undefined): { [key in K]?: string } {
  return (value === undefined || value === "" ? {} : { [name]: value }) as { [key in K]?: string };
}

export function Job() {
  const t = useTexts();
  const { full } = useTimes();
  const { jobId } = useParams({ from: "/console/jobs/$jobId" });
  const [cancelling, cancel] = useState(false);
  const path = { job_id: jobId };
  const job = useQuery({
    queryKey: ["job", jobId],
    queryFn: ({ signal }) => api.get("/jobs/{job_id}", { path, signal }),
    refetchInterval: (query) => {
      const one = query.state.data;
      return one !== undefined && hasEnded(one.lifecycle, one.status) ? false : interval(true);
    },
  });
  const version = job.data?.version;
  const events = useJobEvents(jobId, version);
  const explained = useQuery({
    queryKey: ["job", jobId, "explanation", version],
    queryFn: ({ signal }) => api.get("/jobs/{job_id}/explanation", { path, signal }),
    enabled: job.data !== undefined,
  });
  const lifecycle = useQuery({
    queryKey: ["lifecycle", job.data?.lifecycle],
    queryFn: ({ signal }) => api.get("/lifecycles/{name}", { path: { name: job.data?.lifecycle ?? "" }, signal }),
    enabled: job.data !== undefined,
    staleTime: Number.POSITIVE_INFINITY,
  });
  const requeued = useMutation({
    mutationFn: () => api.post("/jobs/{job_id}/requeue", { path, body: {} }),
    onSuccess: () => toast(t("job.requeued", { id: jobId })),
    onError: failed,
    onSettled: () => void queries.invalidateQueries({ queryKey: ["job", jobId] }),
  });
  if (job.data === undefined) {
    return job.isPending ? <Loading /> : <Failure error={job.error} retry={() => void job.refetch()} list="/console/jobs" />;
  }
  const one = job.data;
  const ended = hasEnded(one.lifecycle, one.status);
  const listed = events.items;
  const sentences = [...(explained.data?.where ?? []), ...(explained.data?.why ?? []), ...(explained.data?.next ?? [])];
  return (
    <>
      <div className="page-head">
        <h1 className="mono">{one.job_id}</h1>
        <Status value={one.status} />
        <code>{one.type}</code>
        <span className="grow" />
        {!ended && (
          <button type="button" className="danger" onClick={() => cancel(true)}>
            {t("job.cancel")}
          </button>
        )}
        {REQUEUEABLE.has(one.status) && (
          <button type="button" className="primary" disabled={requeued.isPending} onClick={() => requeued.mutate()}>
            {t("job.requeue")}
          </button>
        )}
      </div>
      {requeued.error !== null && <Failure error={requeued.error} />}
      <section className="card">
        <h2>{t("job.explain")}</h2>
        {explained.error !== null && <Failure error={explained.error} retry={() => void explained.refetch()} />}
        {sentences.map((sentence) => (
          <p key={sentence}>{sentence}</p>
        ))}
        {explained.data?.traceback != null && (
          <>
            <h3>{t("job.failure")}</h3>
            <pre className="json" tabIndex={0} aria-label={t("job.failure")}>
              {explained.data.traceback}
            </pre>
          </>
        )}
        {(explained.data?.you_can.length ?? 0) > 0 && <h3>{t("job.can")}</h3>}
        {explained.data?.you_can.map((entry) => {
          const [command = "", what = ""] = entry.split("\t");
          return (
            <div key={entry}>
              <Command text={typed(command)} />
              <p className="quiet">{what}</p>
            </div>
          );
        })}
      </section>
      <section className="card">
        <h2>{t("run.timeline")}</h2>
        {events.error !== null ? (
          <Failure error={events.error} retry={() => void events.refetch()} />
        ) : (
          <TimelineDrawing timeline={timelineOf(listed, [], Date.now(), ended)} />
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
        <JobEvents events={events} />
      </section>
      <Log id={jobId} version={version} events={listed} steps={[]} />
      <section className="card">
        <dl className="facts">
          <dt>{t("jobs.lifecycle")}</dt>
          <dd>{one.lifecycle}</dd>
          <dt>{t("jobs.attempt")}</dt>
          <dd>{attempts(one, " / ")}</dd>
          <dt>{t("runs.started")}</dt>
          <dd>{full(one.created_at)}</dd>
          <dt>{t("runs.took")}</dt>
          <dd>{duration(between(one.created_at, ended ? one.updated_at : Date.now()))}</dd>
          <dt>{t("events.correlation")}</dt>
          <dd>
            <Link to="/console/events" search={{ correlation: one.correlation_id }}>
              {one.correlation_id}
            </Link>
          </dd>
        </dl>
        <Json value={one.payload} title={t("job.payload")} />
        <Json value={one.result} title={t("job.result")} />
        <Json value={one} title={t("common.raw")} />
      </section>
      <SameElsewhere
        commands={commands({ trellis: ["job", "show", jobId], address: `/jobs/${jobId}`, python: `print(client.jobs.get(${pythonLiteral(jobId)}))` })}
      />
      {cancelling && <CancelDialog what="job" id={jobId} onClose={() => cancel(false)} />}
    </>
  );
}
