/** Workers, the leases they hold, and the queues and bus topics they serve. */

import { useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useState } from "react";
import { api, type JobListed, type QueueListed, type WorkerListed } from "../api";
import { ActDialog } from "../components/act-dialog";
import { ActTitle, AmountBar, DataTable, depthOf, Loaded, queueColumns, queueKey, type DataColumn } from "../components/operation-parts";
import { Command, Empty, SameElsewhere, Status, toast } from "../components/parts";
import { duration } from "../format";
import { attempts } from "../lib/attempts";
import { commands, pythonLiteral } from "../lib/commands";
import { clockOffset, leaseLeft, leaseState } from "../lib/leases";
import { servedBy } from "../lib/stuck";
import { POLL_MS, queries, useQueues, useWorkers } from "../live";
import { useNow } from "../now";
import { useTexts } from "../texts";

const LEASES_MAX = 200;
/** The statuses in which a worker or a service holds a job, by lifecycle. */
const HELD: Record<string, readonly string[]> = {
  "leased-job": ["running"],
  "bus-job": ["RUNNING"],
  "queue-job": ["CONTEXT_ASSEMBLY", "NOTEBOOKLM_CALL", "ARTIFACT_WRITE"],
};
type HeldLifecycle = "leased-job" | "bus-job" | "queue-job";

export function Workers() {
  const t = useTexts();
  const workers = useWorkers();
  const queues = useQueues();
  return (
    <div className="wide">
      <div className="page-head">
        <h1>{t("workers.title")}</h1>
      </div>
      <section className="card">
        <h2>{t("workers.processes")}</h2>
        <Loaded query={workers}>
          {(page) =>
            page.items.length === 0 ? (
              <Empty title={t("workers.none")} hint={t("workers.none.hint")} command="trellis worker MODULE:APP" />
            ) : (
              <Processes items={page.items} answeredAt={workers.dataUpdatedAt} />
            )
          }
        </Loaded>
      </section>
      {queues.data !== undefined && <Leases workers={workers.data?.items ?? []} answeredAt={workers.dataUpdatedAt} queues={queues.data.items} />}
      <section className="card">
        <h2>{t("workers.queues")}</h2>
        <Loaded query={queues}>
          {(page) =>
            page.items.length === 0 ? (
              <Empty title={t("overview.queues.empty")} command="trellis submit greet world" />
            ) : (
              <Queues items={page.items} workers={workers.data?.items ?? []} />
            )
          }
        </Loaded>
      </section>
      <SameElsewhere commands={commands({ trellis: ["workers"], address: "/workers", python: "print(client.system.workers().items)" })} />
    </div>
  );
}

interface Reported {
  bus?: boolean;
  concurrency?: number;
  pool?: string;
  region?: string;
  capabilities?: string[];
}

function Processes({ items, answeredAt }: { items: WorkerListed[]; answeredAt: number }) {
  const t = useTexts();
  const now = useNow();
  const infoOf = (one: WorkerListed): Reported => (typeof one.info === "object" && one.info !== null ? one.info : {});
  const chips = (words: (string | undefined)[]) =>
    words.filter(Boolean).map((word) => (
      <code key={word} className="chip">
        {word}
      </code>
    ));
  const columns: DataColumn<WorkerListed>[] = [
    { title: t("worker.name"), kind: "mono", cell: (one) => one.name },
    { title: t("worker.state"), cell: (one) => <Status value={one.state} /> },
    {
      title: t("workers.heartbeat"),
      kind: "nowrap",
      cell: (one) => t("workers.ago", { time: duration(Math.round(one.silent_s + Math.max(0, now - answeredAt) / 1_000)) }),
    },
    {
      title: t("workers.load"),
      kind: "nowrap",
      cell: (one) => {
        const room = infoOf(one).concurrency ?? 0;
        return (
          <>
            <AmountBar parts={[{ kind: "held", value: one.held }]} total={room} label={t("workers.load.of", { held: one.held, room })} />{" "}
            {room === 0 ? one.held : `${one.held} / ${room}`}
          </>
        );
      },
    },
    { title: t("workers.serves"), cell: (one) => chips(servedBy(one.info)) },
    {
      title: t("workers.where"),
      cell: (one) => {
        const info = infoOf(one);
        return (
          <>
            {info.bus === true ? t("workers.bus") : t("workers.ledger")}
            {chips([info.pool, info.region, ...(info.capabilities ?? [])])}
          </>
        );
      },
    },
  ];
  return <DataTable label={t("workers.processes")} columns={columns} rows={items} keyOf={(one) => one.name} />;
}

/** Only lifecycles of which something is held are asked for. */
async function heldJobs(lifecycles: readonly HeldLifecycle[], signal: AbortSignal): Promise<{ jobs: JobListed[]; isCut: boolean }> {
  const pages = await Promise.all(
    lifecycles.flatMap((lifecycle) =>
      (HELD[lifecycle] ?? []).map((status) => api.get("/jobs", { query: { lifecycle, status, limit: LEASES_MAX }, signal })),
    ),
  );
  const jobs = pages.flatMap((page) => page.items as JobListed[]).filter((one) => one.lease_expires_at !== null);
  return { jobs, isCut: pages.some((page) => page.next_cursor !== null) };
}

function Leases({ workers, answeredAt, queues: depths }: { workers: WorkerListed[]; answeredAt: number; queues: QueueListed[] }) {
  const t = useTexts();
  const now = useNow();
  const lifecycles = (Object.keys(HELD) as HeldLifecycle[]).filter((name) => depths.some((one) => one.lifecycle === name && one.held > 0));
  const leases = useQuery({
    queryKey: ["jobs", "held", lifecycles],
    queryFn: ({ signal }) => heldJobs(lifecycles, signal),
    refetchInterval: POLL_MS,
    placeholderData: (before) => before,
  });
  const offset = clockOffset(workers, answeredAt);
  return (
    <section className="card">
      <h2>{t("workers.leases")}</h2>
      <p className="quiet">{t("workers.leases.hint")}</p>
      <Loaded query={leases}>
        {({ jobs, isCut }) => {
          if (jobs.length === 0) return <p className="quiet">{t("workers.leases.none")}</p>;
          const rows = jobs
            .map((one) => ({ one, left: leaseLeft(one.lease_expires_at ?? "", now, offset) }))
            .sort((a, b) => a.left - b.left)
            .slice(0, LEASES_MAX);
          const longest = Math.max(30, ...rows.map((row) => row.left));
          const columns: DataColumn<(typeof rows)[number]>[] = [
            {
              title: t("jobs.id"),
              kind: "mono",
              cell: ({ one }) => (
                <Link to="/console/jobs/$jobId" params={{ jobId: one.job_id }}>
                  {one.job_id}
                </Link>
              ),
            },
            { title: t("jobs.type"), cell: ({ one }) => <code>{one.type}</code> },
            { title: t("workers.holder"), kind: "mono", cell: ({ one }) => one.owner },
            { title: t("jobs.attempt"), kind: "num", cell: ({ one }) => attempts(one) },
            {
              title: t("workers.left"),
              kind: "nowrap",
              cell: ({ left }) => (
                <>
                  <AmountBar parts={[{ kind: leaseState(left), value: left }]} total={longest} label={t("workers.left")} />{" "}
                  {left <= 0 ? <span className="badge bad">{t("workers.expired")}</span> : duration(Math.ceil(left))}
                </>
              ),
            },
          ];
          return (
            <>
              <DataTable label={t("workers.leases")} columns={columns} rows={rows} keyOf={({ one }) => one.job_id} />
              {(isCut || jobs.length > rows.length) && <p className="quiet">{t("common.first", { n: rows.length })}</p>}
            </>
          );
        }}
      </Loaded>
    </section>
  );
}

/** What an operator may pause: job types that workers or the queue take, and topics. */
const PAUSABLE = new Set(["leased-job", "queue-job", "bus-job"]);

function Queues({ items, workers }: { items: QueueListed[]; workers: WorkerListed[] }) {
  const t = useTexts();
  const [chosen, choose] = useState<QueueListed | null>(null);
  const serving = (type: string) => workers.filter((one) => one.state === "alive" && servedBy(one.info).includes(type)).length;
  const shared = queueColumns(t, Math.max(1, ...items.map(depthOf)));
  const word = (one: QueueListed) => t(one.paused ? "workers.resume" : "workers.pause");
  const rates = (one: QueueListed) => [
    ...(one.rate_limit === null ? [] : [t("workers.rate.of", { n: one.rate_limit })]),
    ...(one.rate_per_key == null ? [] : [t("workers.rate.key", { n: one.rate_per_key })]),
  ];
  const columns: DataColumn<QueueListed>[] = [
    shared.name,
    { title: t("jobs.lifecycle"), cell: (one) => (one.lifecycle === "bus-job" ? t("workers.topic") : one.lifecycle) },
    ...shared.depths,
    { title: t("workers.rate"), kind: "num nowrap", cell: (one) => rates(one).join(", ") || "–" },
    { title: t("workers.title"), kind: "num", cell: (one) => (PAUSABLE.has(one.lifecycle) && one.lifecycle !== "queue-job" ? serving(one.type) : "–") },
    {
      title: <ActTitle />,
      kind: "num",
      cell: (one) =>
        PAUSABLE.has(one.lifecycle) && (
          <button type="button" className="small" onClick={() => choose(one)} aria-label={`${word(one)} ${one.type}`}>
            {word(one)}
          </button>
        ),
    },
  ];
  return (
    <>
      <div className="legend">
        {(["held", "ready", "blocked", "later"] as const).map((kind) => (
          <span key={kind}>
            <svg width="12" height="12" aria-hidden="true">
              <rect className={`amount-${kind}`} width="12" height="12" rx="3" />
            </svg>{" "}
            {t(`workers.depth.${kind}`)}
          </span>
        ))}
      </div>
      <DataTable label={t("workers.queues")} columns={columns} rows={items} keyOf={queueKey} />
      {items.some((one) => one.ready > 0 && (one.lifecycle === "leased-job" || one.lifecycle === "bus-job") && serving(one.type) === 0) && (
        <>
          <p className="quiet">{t("workers.unserved")}</p>
          <Command text="trellis worker MODULE:APP" />
        </>
      )}
      {chosen !== null && <PauseQueue queue={chosen} onClose={() => choose(null)} />}
    </>
  );
}

function PauseQueue({ queue, onClose }: { queue: QueueListed; onClose: () => void }) {
  const t = useTexts();
  const paused = !queue.paused;
  const word = paused ? "pause" : "resume";
  const body = (reason: string | null) => ({ paused, ...(reason === null ? {} : { reason }) });
  return (
    <ActDialog
      title={t(`workers.${word}.title`)}
      subject={queue.type}
      note={t(`workers.${word}.note`)}
      action={t(`workers.${word}`)}
      act={({ reason }) => api.patch("/queues/{type}", { path: { type: queue.type }, body: { force: false, ...body(reason) } })}
      commandsOf={({ reason }) =>
        commands({
          trellis: ["queues", word, queue.type, ...(reason === null ? [] : ["--reason", reason])],
          method: "PATCH",
          address: `/queues/${encodeURIComponent(queue.type)}`,
          body: body(reason),
          python: `client.system.${word}(${pythonLiteral(queue.type)}${reason === null ? "" : `, reason=${pythonLiteral(reason)}`})`,
        })
      }
      onDone={() => {
        toast(t(`workers.${word}.done`, { type: queue.type }));
        void queries.invalidateQueries({ queryKey: ["queues"] });
      }}
      onClose={onClose}
    />
  );
}
