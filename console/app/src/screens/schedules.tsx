/** Schedules: when agents run and jobs are submitted by themselves; pause, resume and run now. */

import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useState } from "react";
import { api, type ScheduleListed } from "../api";
import { ActDialog } from "../components/act-dialog";
import { ActTitle, DataTable, Loaded, type DataColumn } from "../components/operation-parts";
import { Dialog, Empty, Json, SameElsewhere, toast } from "../components/parts";
import { useTimes } from "../format";
import { commands, pythonLiteral } from "../lib/commands";
import { POLL_SLOW_MS, queries } from "../live";
import { useTexts } from "../texts";

const ADD = "trellis schedules add nightly --cron '0 2 * * *' --type report.daily";
type Act = "pause" | "resume" | "run";

export function Schedules() {
  const t = useTexts();
  const navigate = useNavigate();
  const { name } = useSearch({ from: "/console/schedules" });
  const [asking, ask] = useState<{ act: Act; name: string } | null>(null);
  const schedules = useQuery({ queryKey: ["schedules"], queryFn: ({ signal }) => api.get("/schedules", { signal }), refetchInterval: POLL_SLOW_MS });
  const open = (chosen?: string) => void navigate({ to: "/console/schedules", search: chosen === undefined ? {} : { name: chosen } });
  return (
    <>
      <div className="page-head">
        <h1>{t("schedules.title")}</h1>
      </div>
      <Loaded query={schedules}>
        {(page) =>
          page.items.length === 0 ? (
            <Empty title={t("schedules.none")} hint={t("schedules.none.hint")} command={ADD} />
          ) : (
            <section className="card">
              <Listing items={page.items} ask={(act, chosen) => ask({ act, name: chosen })} open={open} />
            </section>
          )
        }
      </Loaded>
      <SameElsewhere commands={commands({ trellis: ["schedules", "list"], address: "/schedules", python: "print(client.schedules.list().items)" })} />
      {asking !== null && <ChangeSchedule {...asking} onClose={() => ask(null)} />}
      {name !== undefined && <Detail name={name} onClose={() => open()} />}
    </>
  );
}

function Listing({ items, ask, open }: { items: ScheduleListed[]; ask: (act: Act, name: string) => void; open: (name: string) => void }) {
  const t = useTexts();
  const { ago, full } = useTimes();
  const at = (time: string) => <span title={full(time)}>{ago(time)}</span>;
  const button = (act: Act, name: string) => {
    const word = t(act === "run" ? "schedules.run" : `workers.${act}`);
    return (
      <button type="button" className="small" aria-label={`${word} ${name}`} onClick={() => ask(act, name)}>
        {word}
      </button>
    );
  };
  const columns: DataColumn<ScheduleListed>[] = [
    {
      title: t("schedules.name"),
      cell: (one) => (
        <>
          {one.agent === null ? (
            <button type="button" className="plain link" onClick={() => open(one.name)}>
              {one.name}
            </button>
          ) : (
            one.name
          )}{" "}
          {one.paused && <span className="badge warn">{t("queue.paused")}</span>}
        </>
      ),
    },
    {
      title: t("schedules.starts"),
      cell: (one) => (
        <>
          {one.agent !== null ? t("schedules.agent") : one.topic !== null ? t("workers.topic") : t("schedules.job")} <code>{one.agent ?? one.topic ?? one.type}</code>
        </>
      ),
    },
    {
      title: t("schedules.cron"),
      kind: "nowrap",
      cell: (one) => (
        <>
          <code>{one.cron ?? "–"}</code> <span className="quiet">{one.tz}</span>
        </>
      ),
    },
    { title: t("schedules.next"), kind: "nowrap", cell: (one) => (one.next_at == null || one.paused ? "–" : at(one.next_at)) },
    {
      title: t("schedules.last"),
      cell: (one) => (
        <>
          {one.last_at == null ? "–" : at(one.last_at)}{" "}
          {one.last_run != null && (
            <Link className="mono" to="/console/runs/$runId" params={{ runId: one.last_run }}>
              {one.last_run}
            </Link>
          )}
          {one.last_job != null && (
            <Link className="mono" to="/console/jobs/$jobId" params={{ jobId: one.last_job }}>
              {one.last_job}
            </Link>
          )}
          {one.skipped != null && <span className="quiet"> {one.skipped}</span>}
        </>
      ),
    },
    { title: t("schedules.owner"), cell: (one) => one.owner ?? "–" },
    {
      title: <ActTitle />,
      cell: (one) =>
        one.agent === null ? (
          <span className="row nowrap">
            {button("run", one.name)}
            {button(one.paused ? "resume" : "pause", one.name)}
          </span>
        ) : (
          <span className="quiet">{t("schedules.inFile")}</span>
        ),
    },
  ];
  return <DataTable label={t("schedules.title")} columns={columns} rows={items} keyOf={(one) => `${one.agent ?? ""}-${one.name}`} />;
}

function ChangeSchedule({ act, name, onClose }: { act: Act; name: string; onClose: () => void }) {
  const t = useTexts();
  const navigate = useNavigate();
  const path = { name };
  const why = (reason: string | null) => (reason === null ? {} : { reason });
  const send = async (reason: string | null) => {
    if (act !== "run") return api.patch("/schedules/{name}", { path, body: { paused: act === "pause", ...why(reason) } });
    const made = await api.post("/schedules/{name}/run", { path });
    void navigate({ to: "/console/jobs/$jobId", params: { jobId: made.job_id } });
    return made;
  };
  return (
    <ActDialog
      title={t(`schedules.${act}.title`)}
      subject={name}
      note={t(`schedules.${act}.note`)}
      action={t(act === "run" ? "schedules.run" : `workers.${act}`)}
      withReason={act !== "run"}
      act={({ reason }) => send(reason)}
      commandsOf={({ reason }) =>
        commands({
          trellis: ["schedules", act, name, ...(reason === null ? [] : ["--reason", reason])],
          method: act === "run" ? "POST" : "PATCH",
          address: `/schedules/${encodeURIComponent(name)}${act === "run" ? "/run" : ""}`,
          ...(act === "run" ? {} : { body: { paused: act === "pause", ...why(reason) } }),
          python: `client.schedules.${act}(${pythonLiteral(name)}${reason === null ? "" : `, reason=${pythonLiteral(reason)}`})`,
        })
      }
      onDone={() => {
        toast(t(`schedules.${act}.done`, { name }));
        void queries.invalidateQueries({ queryKey: ["schedules"] });
      }}
      onClose={onClose}
    />
  );
}

function Detail({ name, onClose }: { name: string; onClose: () => void }) {
  const t = useTexts();
  const { full } = useTimes();
  const detail = useQuery({ queryKey: ["schedules", name], queryFn: ({ signal }) => api.get("/schedules/{name}", { path: { name }, signal }) });
  return (
    <Dialog title={name} onClose={onClose}>
      <Loaded query={detail}>
        {(one) => (
          <>
            <dl className="facts">
              <dt>{t("schedules.cron")}</dt>
              <dd>
                <code>{one.cron}</code> {one.tz}
              </dd>
              <dt>{t("schedules.misfire")}</dt>
              <dd>{one.misfire}</dd>
              <dt>{t("schedules.overlap")}</dt>
              <dd>{one.overlap}</dd>
              <dt>{t("schedules.next")}</dt>
              <dd>
                {one.paused
                  ? t("queue.paused")
                  : one.next.map((at) => (
                      <div key={at}>{full(at)}</div>
                    ))}
              </dd>
            </dl>
            <Json value={one.payload} title={t("job.payload")} />
          </>
        )}
      </Loaded>
      <SameElsewhere
        commands={commands({
          trellis: ["schedules", "show", name],
          address: `/schedules/${encodeURIComponent(name)}`,
          python: `print(client.schedules.get(${pythonLiteral(name)}))`,
        })}
      />
      <div className="row end">
        <button type="button" data-focus="true" onClick={onClose}>
          {t("common.close")}
        </button>
      </div>
    </Dialog>
  );
}
