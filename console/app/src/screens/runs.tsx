/** Runs: the list with its filter, and the start of a new one. */

import { useInfiniteQuery, useMutation } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { useCallback, useId, useMemo, useState } from "react";
import { api, type RunListed } from "../api";
import { FilterBox } from "../components/filter-box";
import { ParamsForm } from "../components/params-form";
import { Dialog, Empty, Failure, SameElsewhere, Status } from "../components/parts";
import { PagedTable, type Column } from "../components/table";
import { between, duration, useTimes } from "../format";
import { commands, optionsOf, pythonArguments, pythonLiteral } from "../lib/commands";
import { parseFilter, passes, valueOf, type FilterFields } from "../lib/filter";
import { rowsBy } from "../lib/pages";
import { paramsOf, rowsOf, textOf, type Row } from "../lib/params";
import { failed, queries, useAgents, useSomeAgent } from "../live";
import { useTexts } from "../texts";

const RUN_STATUSES = ["requested", "queued", "running", "completed", "failed"] as const;
const PAGE = 100;

export function Runs() {
  const t = useTexts();
  const { ago } = useTimes();
  const navigate = useNavigate();
  const { q = "" } = useSearch({ from: "/console/runs" });
  const [starting, start] = useState(false);
  const agents = useAgents();
  const someAgent = useSomeAgent();
  const fields: FilterFields = {
    status: { values: RUN_STATUSES },
    agent: { values: (agents.data?.items ?? []).flatMap((one) => (one.slug == null ? [] : [one.slug])) },
    trigger: { values: ["manual", "schedule", "event", "inbox"] },
    age: { duration: true },
  };
  const filter = parseFilter(q, fields);
  const status = RUN_STATUSES.find((one) => one === valueOf(filter, "status"));
  const agent = valueOf(filter, "agent");
  const queryKey = ["runs", status, agent];
  const listing = useInfiniteQuery({
    queryKey,
    meta: rowsBy("run_id", true),
    queryFn: ({ pageParam, signal }) =>
      api.get("/runs", { query: { limit: PAGE, cursor: pageParam, ...(status ? { status } : {}), ...(agent ? { agent } : {}) }, signal }),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor,
  });
  const rows = useMemo(
    () => (listing.data?.pages ?? []).flatMap((page) => page.items).filter((one) => passes(filter, valuesOf(one))),
    // eslint-disable-next-line react-hooks/exhaustive-deps
    [listing.data, q],
  );
  const columns: Column<RunListed>[] = [
    { title: t("runs.id"), width: "minmax(13rem, 2fr)", cell: (one) => one.run_id },
    { title: t("runs.agent"), width: "minmax(8rem, 1.4fr)", cell: (one) => one.agent_slug },
    { title: t("runs.status"), width: "6.5rem", cell: (one) => <Status value={one.status} /> },
    { title: t("runs.trigger"), width: "6rem", cell: (one) => one.trigger },
    { title: t("runs.started"), width: "7rem", cell: (one) => ago(one.created_at) },
    { title: t("runs.took"), width: "6rem", cell: (one) => (one.archived ? duration(between(one.created_at, one.updated_at)) : "…") },
    { title: t("runs.proposals"), width: "6.5rem", cell: (one) => one.proposals ?? 0 },
  ];
  const search = useCallback(
    (text: string) => void navigate({ to: "/console/runs", search: text === "" ? {} : { q: text }, replace: true }),
    [navigate],
  );
  return (
    <>
      <div className="page-head">
        <h1>{t("runs.title")}</h1>
        <FilterBox value={q} onChange={search} fields={fields} filter={filter} example={`status:failed agent:${someAgent} age>5m`} />
        <button type="button" className="primary" onClick={() => start(true)}>
          {t("runs.start")}
        </button>
      </div>
      <PagedTable
        listing={listing}
        queryKey={queryKey}
        label={t("runs.title")}
        rows={rows}
        columns={columns}
        keyOf={(one) => one.run_id}
        linkOf={(one) => ({ to: "/console/runs/$runId", params: { runId: one.run_id } })}
        empty={q === "" ? <Empty title={t("runs.empty")} command={`trellis run ${someAgent} --watch`} /> : <Empty title={t("runs.empty.filter")} />}
      />
      <SameElsewhere
        commands={commands({
          trellis: ["runs", "list", ...optionsOf({ status, agent })],
          address: `/runs?${new URLSearchParams({ ...(status ? { status } : {}), ...(agent ? { agent } : {}), limit: String(PAGE) })}`,
          python: `print(client.runs.list(${pythonArguments({ status, agent })}))`,
        })}
      />
      {starting && <StartRun onClose={() => start(false)} />}
    </>
  );
}

function valuesOf(one: RunListed) {
  return { id: one.run_id, agent: one.agent_slug, status: one.status, trigger: one.trigger, age: between(one.created_at, Date.now()) };
}

/** `given` are the parameters to begin with; null says that they are no longer known. */
export function StartRun({ agent, given, onClose }: { agent?: string; given?: Record<string, unknown> | null; onClose: () => void }) {
  const t = useTexts();
  const navigate = useNavigate();
  const [slug, choose] = useState(agent ?? "");
  const [rows, setRows] = useState<Row[]>(() => rowsOf(given ?? {}));
  const first = useId();
  const agents = useAgents();
  const { params, problem } = paramsOf(rows);
  const known = (agents.data?.items ?? []).flatMap((one) => (one.slug == null ? [] : [one.slug]));
  // A chosen agent that is not listed stays an option: the browser would show another one than is started.
  const options = slug === "" || known.includes(slug) ? known : [slug, ...known];
  const chosen = slug || known[0] || "";
  const sent = useMutation({
    mutationFn: () => api.post("/agents/run", { body: { agent_slug: chosen, params } }),
    onSuccess: (run) => {
      void queries.invalidateQueries({ queryKey: ["runs"] });
      onClose();
      void navigate({ to: "/console/runs/$runId", params: { runId: run.run_id } });
    },
    onError: failed,
  });
  return (
    <Dialog title={t("runs.start")} onClose={onClose}>
      <form onSubmit={(event) => (event.preventDefault(), problem === null && sent.mutate())}>
        <label htmlFor={first}>{t("runs.start.agent")}</label>
        <select id={first} value={chosen} onChange={(event) => choose(event.target.value)}>
          {options.map((one) => (
            <option key={one}>{one}</option>
          ))}
        </select>
        {given === null && <p className="banner">{t("runs.again.unknown")}</p>}
        <ParamsForm rows={rows} onChange={setRows} />
        {problem !== null && <p role="alert">{t(`agents.params.${problem}`)}</p>}
        {agents.error !== null && <Failure error={agents.error} retry={() => void agents.refetch()} />}
        {sent.error !== null && <Failure error={sent.error} />}
        <div className="row end">
          <button type="button" onClick={onClose}>
            {t("common.cancel")}
          </button>
          <button type="submit" className="primary" disabled={sent.isPending || problem !== null || chosen === ""}>
            {t("runs.start.go")}
          </button>
        </div>
      </form>
      <SameElsewhere
        commands={commands({
          trellis: ["run", chosen, ...Object.entries(params).flatMap(([name, value]) => ["--param", `${name}=${textOf(value)}`])],
          method: "POST",
          address: "/agents/run",
          body: { agent_slug: chosen, params },
          python: `print(client.runs.start(${pythonLiteral(chosen)}, ${pythonLiteral(params)}).run_id)`,
        })}
      />
    </Dialog>
  );
}
