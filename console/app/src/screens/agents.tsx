/** Agents: the list, and one agent with its definition, sources, memory, triggers, slot and queue. */

import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { Link, useNavigate, useParams, useSearch } from "@tanstack/react-router";
import { useState } from "react";
import { api, type AgentDetail, type AgentListed, type RunListed } from "../api";
import { ActDialog } from "../components/act-dialog";
import { Empty, Failure, Json, Loading, SameElsewhere, Status, toast } from "../components/parts";
import { PagedTable, type Column } from "../components/table";
import { useTimes } from "../format";
import { AGENT_PARTS } from "../lib/agents";
import { commands, optionsOf, pythonLiteral } from "../lib/commands";
import { interval, queries } from "../live";
import { useTexts } from "../texts";
import { useStatusText } from "../texts-statuses";
import { History, Memory } from "./agent-memory";
import { StartRun } from "./runs";

const PAGE = 100;
const QUEUE_SHOWN = 20;

export function Agents() {
  const t = useTexts();
  const { ago } = useTimes();
  const queryKey = ["agents", "list"];
  const listing = useInfiniteQuery({
    queryKey,
    queryFn: ({ pageParam, signal }) => api.get("/agents", { query: { limit: PAGE, cursor: pageParam }, signal }),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor,
    refetchInterval: () => interval(false),
  });
  const schedules = useQuery({
    queryKey: ["schedules"],
    queryFn: ({ signal }) => api.get("/schedules", { signal }),
    refetchInterval: () => interval(false),
    retry: false,
  });
  const next = new Map((schedules.data?.items ?? []).flatMap((one) => (one.agent != null && one.next_at != null ? [[one.agent, one.next_at] as const] : [])));
  const columns: Column<AgentListed>[] = [
    { title: t("agents.slug"), width: "minmax(10rem, 1.2fr)", cell: (one) => one.slug ?? "?" },
    { title: t("agents.status"), width: "6.5rem", cell: (one) => <Status value={one.status} /> },
    { title: t("agents.name"), width: "minmax(8rem, 1fr)", cell: (one) => one.name ?? "" },
    { title: t("agents.schedule"), width: "7rem", cell: (one) => <span className="mono">{one.cron ?? "–"}</span> },
    { title: t("agents.next"), width: "7rem", cell: (one) => soon(next.get(one.slug ?? ""), ago) },
    { title: t("agents.about"), width: "minmax(12rem, 2.5fr)", cell: (one) => one.last_error ?? one.problems?.[0] ?? one.description ?? "" },
  ];
  return (
    <>
      <div className="page-head">
        <h1>{t("agents.title")}</h1>
      </div>
      <PagedTable
        listing={listing}
        queryKey={queryKey}
        label={t("agents.title")}
        rows={(listing.data?.pages ?? []).flatMap((page) => page.items)}
        columns={columns}
        keyOf={(one) => one.slug ?? "?"}
        linkOf={(one) => ({ to: "/console/agents/$slug", params: { slug: one.slug ?? "?" } })}
        empty={<Empty title={t("agents.empty")} hint={t("agents.empty.hint")} command={'trellis agents create notes --purpose "Keeps my notes consistent" --source notes.md'} />}
      />
      <SameElsewhere commands={commands({ trellis: ["agents", "list"], address: "/agents", python: "print(client.agents.list())" })} />
    </>
  );
}

function soon(at: string | undefined, ago: (time: string) => string): string {
  return at === undefined ? "–" : ago(at);
}

export function AgentPage() {
  const t = useTexts();
  const navigate = useNavigate();
  const { slug } = useParams({ from: "/console/agents/$slug" });
  const { part = "definition" } = useSearch({ from: "/console/agents/$slug" });
  const [asking, ask] = useState<"run" | "pause" | "activate" | null>(null);
  const one = useQuery({
    queryKey: ["agents", "one", slug],
    queryFn: ({ signal }) => api.get("/agents/{slug}", { path: { slug }, signal }),
    refetchInterval: () => interval(false),
  });
  if (one.data === undefined) {
    return one.isPending ? <Loading /> : <Failure error={one.error} retry={() => void one.refetch()} />;
  }
  const agent = one.data;
  return (
    <article aria-label={agent.name ?? slug}>
      <div className="page-head">
        <h1>{agent.name ?? slug}</h1>
        <Status value={agent.status} />
        <span className="mono quiet">{slug}</span>
        <span className="grow" />
        {agent.status === "active" && (
          <button type="button" onClick={() => ask("pause")}>
            {t("agents.pause")}
          </button>
        )}
        {["paused", "error", "draft"].includes(agent.status) && (
          <button type="button" onClick={() => ask("activate")}>
            {t("agents.activate")}
          </button>
        )}
        <button type="button" className="primary" disabled={agent.status !== "active"} onClick={() => ask("run")}>
          {t("agents.run")}
        </button>
      </div>
      <Trouble agent={agent} />
      <div className="two">
        <Triggers agent={agent} />
        <Slot slug={slug} isActive={agent.status === "active"} />
      </div>
      <div className="page-head tabs" role="group" aria-label={t("agents.parts")}>
        {AGENT_PARTS.map((name) => (
          <button
            key={name}
            type="button"
            aria-pressed={name === part}
            onClick={() => void navigate({ to: "/console/agents/$slug", params: { slug }, search: { part: name }, replace: true })}
          >
            {t(`agents.${name}`)}
          </button>
        ))}
      </div>
      {part === "definition" && <Definition agent={agent} slug={slug} />}
      {part === "sources" && <Sources slug={slug} />}
      {part === "memory" && <Memory slug={slug} />}
      {part === "history" && <History slug={slug} />}
      {asking === "run" && <StartRun agent={slug} onClose={() => ask(null)} />}
      {(asking === "pause" || asking === "activate") && <ChangeStatus slug={slug} what={asking} onClose={() => ask(null)} />}
    </article>
  );
}

/** What is wrong with the agent, and what to do about it. */
function Trouble({ agent }: { agent: AgentDetail }) {
  const t = useTexts();
  const problems = agent.problems ?? [];
  const warnings = agent.warnings ?? [];
  return (
    <>
      {agent.status === "error" && <p className="banner bad">{t("agents.stopped", { n: agent.failed_in_a_row ?? agent.failed_in_a_row_max ?? "" })}</p>}
      {problems.length > 0 && <Notes kind="bad" title={t("agents.malformed")} items={problems} />}
      {warnings.length > 0 && <Notes kind="" title={t("agents.warnings")} items={warnings} />}
    </>
  );
}

function Notes({ kind, title, items }: { kind: string; title: string; items: string[] }) {
  return (
    <div className={`banner ${kind}`}>
      <strong>{title}</strong>
      <ul className="lines">
        {items.map((one) => (
          <li key={one}>{one}</li>
        ))}
      </ul>
    </div>
  );
}

/** What starts the agent, when its schedule is due, and how often it failed in a row. */
function Triggers({ agent }: { agent: AgentDetail }) {
  const t = useTexts();
  const { full, ago } = useTimes();
  const instants = agent.next ?? [];
  const events = agent.events ?? [];
  const failures = agent.failed_in_a_row ?? null;
  return (
    <section className="card">
      <h2>{t("agents.triggers")}</h2>
      <dl className="facts">
        <dt>{t("agents.triggers.list")}</dt>
        <dd className="chips">
          {agent.manual === true && <span className="badge">{t("agents.triggers.manual")}</span>}
          {agent.cron != null && <span className="badge info mono">{agent.cron}</span>}
          {events.map((one) => (
            <span key={one} className="badge info mono">
              {one}
            </span>
          ))}
          {agent.manual !== true && agent.cron == null && events.length === 0 && t("agents.triggers.none")}
        </dd>
        <dt>{t("agents.instants")}</dt>
        <dd>
          {instants.length === 0 && <span className="quiet">{t("agents.instants.none")}</span>}
          {instants.map((one) => (
            <div key={one}>
              {full(one)} <span className="quiet">({ago(one)})</span>
            </div>
          ))}
        </dd>
        {failures !== null && (
          <>
            <dt>{t("agents.failing")}</dt>
            <dd>
              <span className={`badge ${failures === 0 ? "good" : agent.status === "error" ? "bad" : "warn"}`}>
                {t("agents.failing.of", { n: failures, max: agent.failed_in_a_row_max ?? "?" })}
              </span>
            </dd>
          </>
        )}
        {agent.last_run != null && (
          <>
            <dt>{t("agents.last")}</dt>
            <dd>
              <Link to="/console/runs/$runId" params={{ runId: agent.last_run }}>
                {agent.last_run}
              </Link>
              : {agent.last_error}
            </dd>
          </>
        )}
      </dl>
    </section>
  );
}

/** The run that holds the agent's slot, and those that wait for it, the next one first. */
function Slot({ slug, isActive }: { slug: string; isActive: boolean }) {
  const t = useTexts();
  const { ago } = useTimes();
  const list = (status: "running" | "queued" | "requested") => ({
    queryKey: ["runs", "slot", slug, status],
    queryFn: ({ signal }: { signal: AbortSignal }) => api.get("/runs", { query: { agent: slug, status, limit: QUEUE_SHOWN }, signal }),
    refetchInterval: () => interval(true),
  });
  const running = useQuery(list("running"));
  const queued = useQuery(list("queued"));
  const requested = useQuery(list("requested"));
  const error = running.error ?? queued.error ?? requested.error;
  const waiting = [...(queued.data?.items ?? []), ...(requested.data?.items ?? [])].sort((a, b) => (a.created_at < b.created_at ? -1 : 1));
  const holders = running.data?.items ?? [];
  const isCut = [running, queued, requested].some((one) => one.data != null && one.data.next_cursor !== null);
  const row = (one: RunListed, what: string, kind: string) => (
    <tr key={one.run_id}>
      <td className="mono">
        <Link to="/console/runs/$runId" params={{ runId: one.run_id }}>
          {one.run_id}
        </Link>
      </td>
      <td>
        <span className={`badge ${kind}`}>{what}</span>
      </td>
      <td className="quiet nowrap">{ago(one.created_at)}</td>
    </tr>
  );
  return (
    <section className="card">
      <h2>{t("agents.slot")}</h2>
      <p className="quiet">{t("agents.slot.hint")}</p>
      {error !== null ? (
        <Failure error={error} />
      ) : running.isPending || queued.isPending || requested.isPending ? (
        <Loading />
      ) : holders.length + waiting.length === 0 ? (
        <p>{t(isActive ? "agents.slot.free" : "agents.slot.inactive")}</p>
      ) : (
        <div className="scroll-x" tabIndex={0} role="group" aria-label={t("agents.slot")}>
          <table>
            <tbody>
              {holders.map((one) => row(one, t("agents.slot.holder"), "good"))}
              {waiting.map((one, at) => row(one, t("agents.slot.waits", { n: at + 1 }), "warn"))}
            </tbody>
          </table>
          {isCut && <p className="quiet">{t("common.newest", { n: QUEUE_SHOWN })}</p>}
        </div>
      )}
      <p>
        <Link to="/console/runs" search={{ q: `agent:${slug}` }}>
          {t("agents.runs")}
        </Link>
      </p>
    </section>
  );
}

function Definition({ agent, slug }: { agent: AgentDetail; slug: string }) {
  const t = useTexts();
  const { full } = useTimes();
  return (
    <>
      <section className="card">
        <p className="prose">{agent.description}</p>
        <dl className="facts">
          <dt>{t("agents.model")}</dt>
          <dd>
            {agent.model == null
              ? "–"
              : t("agents.model.value", { model: agent.model, temperature: agent.temperature ?? "–", steps: agent.max_steps ?? "–" })}
          </dd>
          <dt>{t("agents.tools")}</dt>
          <dd className="mono">{(agent.tools ?? []).join(", ") || "–"}</dd>
          <dt>{t("agents.proposes")}</dt>
          <dd className="mono">{(agent.safe_outputs ?? []).join(", ") || "–"}</dd>
          <dt>{t("agents.reads")}</dt>
          <dd>{t("agents.reads.value", { n: agent.max_sources ?? "–", folder: agent.folder ?? "–", mode: agent.memory_mode ?? "–" })}</dd>
          {agent.updated_at != null && (
            <>
              <dt>{t("agents.updated")}</dt>
              <dd>
                {full(agent.updated_at)}, {agent.created_by}
              </dd>
            </>
          )}
          {agent.sha256 != null && (
            <>
              <dt>SHA-256</dt>
              <dd className="mono">{agent.sha256}</dd>
            </>
          )}
        </dl>
        {agent.instructions != null && (
          <>
            <h2 className="spaced">{t("agents.instructions")}</h2>
            <pre className="text-file" tabIndex={0}>
              {agent.instructions.trim()}
            </pre>
          </>
        )}
        <Json value={agent} title={t("common.raw")} />
      </section>
      <SameElsewhere
        commands={commands({
          trellis: ["agents", "show", slug],
          address: `/agents/${slug}`,
          python: `print(client.agents.get(${pythonLiteral(slug)}))`,
        })}
      />
    </>
  );
}

function Sources({ slug }: { slug: string }) {
  const t = useTexts();
  const found = useQuery({
    queryKey: ["agents", "sources", slug],
    queryFn: ({ signal }) => api.get("/agents/{slug}/sources", { path: { slug }, signal }),
  });
  if (found.data === undefined) {
    return found.isPending ? <Loading /> : <Failure error={found.error} retry={() => void found.refetch()} />;
  }
  const sources = found.data;
  return (
    <>
      <section className="card">
        <p>
          <span className="badge">{t("agents.sources.tokens", { n: sources.tokens, max: sources.tokens_max })}</span>
        </p>
        {sources.items.length === 0 && <p className="quiet">{t("agents.sources.none")}</p>}
        {sources.items.map((one) => (
          <details key={one.ref}>
            <summary>
              <span className="mono">{one.ref}</span> <span className="quiet">{t("agents.sources.chars", { n: one.text.length.toLocaleString() })}</span>
            </summary>
            <pre className="text-file" tabIndex={0}>
              {one.text}
            </pre>
          </details>
        ))}
        {sources.left_out.length > 0 && (
          <>
            <h2 className="spaced">{t("agents.sources.left")}</h2>
            <ul className="lines">
              {sources.left_out.map((one) => (
                <li key={one.ref}>
                  <code>{one.ref}</code> <span className="badge warn">{one.reason.replaceAll("_", " ")}</span> {one.detail}
                </li>
              ))}
            </ul>
          </>
        )}
      </section>
      <SameElsewhere
        commands={commands({
          trellis: ["agents", "sources", slug],
          address: `/agents/${slug}/sources`,
          python: `print(client.agents.sources(${pythonLiteral(slug)}))`,
        })}
      />
    </>
  );
}

function ChangeStatus({ slug, what, onClose }: { slug: string; what: "pause" | "activate"; onClose: () => void }) {
  const t = useTexts();
  const nameOf = useStatusText();
  const status = what === "pause" ? ("paused" as const) : ("active" as const);
  return (
    <ActDialog
      title={t(`agents.${what}.title`)}
      subject={slug}
      note={t(`agents.${what}.hint`)}
      action={t(`agents.${what}`)}
      act={({ reason }) => api.patch("/agents/{slug}/status", { path: { slug }, body: { status, reason } })}
      commandsOf={({ reason }) =>
        commands({
          trellis: ["agents", what, slug, ...optionsOf({ reason })],
          method: "PATCH",
          address: `/agents/${slug}/status`,
          body: { status, reason },
          python: `client.agents.${what}(${pythonLiteral(slug)}${reason === null ? "" : `, reason=${pythonLiteral(reason)}`})`,
        })
      }
      onDone={(answer) => toast(t("agents.changed", { slug, status: nameOf(answer.status).text }))}
      onSettled={() => void queries.invalidateQueries({ queryKey: ["agents"] })}
      onClose={onClose}
    />
  );
}
