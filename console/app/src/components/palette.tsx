/** The search over everything: screens, agents, runs, proposals, jobs, errors and alerts. Opened by Cmd-K or Ctrl-K. */

import { useQuery } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { useEffect, useId, useRef, useState, type KeyboardEvent } from "react";
import { api } from "../api";
import { find, idKind, QUERY_MAX, type Entry } from "../lib/search";
import { allAgents } from "../live";
import { summaryOf } from "../screens/proposals";
import { useTexts } from "../texts";
import { Status, Toasts, useLayer } from "./parts";

const LISTED_MAX = 200;
const SETTLE_MS = 200;
const STALE_MS = 10_000;

/** What the lists of the gateway have. A list that the role may not read is left out. */
async function entriesOf(signal: AbortSignal): Promise<Entry[]> {
  const [agents, runs, proposals, jobs, dead, alerts] = await Promise.allSettled([
    allAgents(signal),
    api.get("/runs", { query: { limit: LISTED_MAX }, signal }),
    api.get("/proposals", { query: { limit: LISTED_MAX }, signal }),
    api.get("/jobs", { query: { limit: LISTED_MAX }, signal }),
    api.get("/dlq", { query: { limit: LISTED_MAX }, signal }),
    api.get("/alerts", { query: { open: true, limit: LISTED_MAX }, signal }),
  ]);
  const items = <T,>(result: PromiseSettledResult<{ items: T[] }>): T[] => (result.status === "fulfilled" ? result.value.items : []);
  return [
    ...items(agents).flatMap((one): Entry[] =>
      one.slug == null ? [] : [{ kind: "agent", id: one.slug, title: one.slug, note: one.name ?? "", to: "/console/agents/$slug", params: { slug: one.slug } }],
    ),
    ...items(runs).map((one): Entry => ({ kind: "run", id: one.run_id, title: one.run_id, note: `${one.agent_slug} ${one.status}`, to: "/console/runs/$runId", params: { runId: one.run_id } })),
    ...items(proposals).map((one): Entry => ({ kind: "proposal", id: one.id, title: summaryOf(one), note: `${one.id} ${one.status}`, to: "/console/proposals", search: { status: "all", id: one.id } })),
    ...items(jobs).map((one): Entry => ({ kind: "job", id: one.job_id, title: one.job_id, note: `${one.type} ${one.status}`, to: "/console/jobs/$jobId", params: { jobId: one.job_id } })),
    ...items(dead).map((one): Entry => ({ kind: "error", id: one.job_id, title: one.last_error, note: `${one.type} ${one.reason_code} ${one.job_id}`, to: "/console/jobs/$jobId", params: { jobId: one.job_id } })),
    ...items(alerts).map((one): Entry => ({ kind: "alert", id: one.id, title: one.text, note: one.name, to: "/console/alerts" })),
  ];
}

/** The thing with exactly this id, however old it is. */
async function lookedUp(text: string, signal: AbortSignal): Promise<Entry[]> {
  const id = text.trim();
  try {
    switch (idKind(id)) {
      case "run": {
        const run = await api.get("/runs/{run_id}", { path: { run_id: id }, signal });
        return [{ kind: "run", id, title: id, note: `${run.agent_slug} ${run.status}`, to: "/console/runs/$runId", params: { runId: id } }];
      }
      case "proposal": {
        const one = await api.get("/proposals/{proposal_id}", { path: { proposal_id: id }, signal });
        return [{ kind: "proposal", id, title: summaryOf(one), note: `${id} ${one.status}`, to: "/console/proposals", search: { status: "all", id } }];
      }
      case "job": {
        const job = await api.get("/jobs/{job_id}", { path: { job_id: id }, signal });
        return [{ kind: "job", id: job.job_id, title: job.job_id, note: `${job.type} ${job.status}`, to: "/console/jobs/$jobId", params: { jobId: job.job_id } }];
      }
      default:
        return [];
    }
  } catch {
    return []; // nothing has this id, or the role may not read it
  }
}

export function Palette({ screens, onClose }: { screens: { to: string; title: string }[]; onClose: () => void }) {
  const t = useTexts();
  const navigate = useNavigate();
  const dialog = useRef<HTMLDialogElement>(null);
  const layer = useLayer();
  const list = useId();
  const [text, setText] = useState("");
  const [settled, settle] = useState("");
  const [chosen, choose] = useState(0);
  useEffect(() => dialog.current?.showModal(), []);
  useEffect(() => {
    const timer = setTimeout(() => settle(text), SETTLE_MS);
    return () => clearTimeout(timer);
  }, [text]);
  const listed = useQuery({ queryKey: ["palette"], queryFn: ({ signal }) => entriesOf(signal), staleTime: STALE_MS });
  const byId = useQuery({
    queryKey: ["palette", settled],
    queryFn: ({ signal }) => lookedUp(settled, signal),
    enabled: idKind(settled) !== null,
    staleTime: STALE_MS,
  });
  const pages = screens.map((one): Entry => ({ kind: "screen", id: one.to, title: one.title, note: "", to: one.to }));
  const known = listed.data ?? [];
  const found = (byId.data ?? []).filter((one) => !known.some((other) => other.kind === one.kind && other.id === one.id));
  const hits = find([...pages, ...known, ...found], text);
  const at = Math.min(chosen, hits.length - 1);
  const open = (entry: Entry | undefined) => {
    if (entry === undefined) return;
    onClose();
    void navigate({ to: entry.to, params: entry.params ?? {}, search: entry.search ?? {} } as never);
  };
  const pressed = (event: KeyboardEvent) => {
    event.stopPropagation();
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const step = event.key === "ArrowDown" ? 1 : -1;
      const next = hits.length === 0 ? 0 : (at + step + hits.length) % hits.length;
      choose(next);
      document.getElementById(`${list}-${next}`)?.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter") {
      event.preventDefault();
      open(hits[at]);
    }
  };
  return (
    <dialog ref={dialog} className="palette" aria-label={t("search.title")} onClose={onClose} onKeyDown={pressed}>
      <input
        role="combobox"
        aria-label={t("search.title")}
        aria-expanded={hits.length > 0}
        aria-controls={list}
        aria-autocomplete="list"
        aria-activedescendant={hits.length > 0 ? `${list}-${at}` : undefined}
        value={text}
        maxLength={QUERY_MAX}
        placeholder={t("search.placeholder")}
        spellCheck={false}
        autoComplete="off"
        onChange={(event) => (setText(event.target.value), choose(0))}
      />
      <ul id={list} role="listbox" aria-label={t("search.title")}>
        {hits.map((one, place) => (
          <li
            key={`${one.kind}-${one.id}`}
            id={`${list}-${place}`}
            role="option"
            aria-selected={place === at}
            onMouseMove={() => choose(place)}
            onClick={() => open(one)}
          >
            <span className="kind">{hits[place - 1]?.kind === one.kind ? "" : t(`search.${one.kind}`)}</span>
            <span className="title">{one.title}</span>
            <Note entry={one} />
          </li>
        ))}
      </ul>
      <p className="quiet" role="status">
        {listed.isPending ? `${t("common.loading")}…` : hits.length === 0 ? t("search.none") : t("search.keys")}
      </p>
      <Toasts layer={layer} />
    </dialog>
  );
}

/** The last word of a run's or job's note is its status. */
function Note({ entry }: { entry: Entry }) {
  if (entry.kind !== "run" && entry.kind !== "job" && entry.kind !== "proposal") return <span className="quiet note">{entry.note}</span>;
  const words = entry.note.split(" ");
  return (
    <span className="quiet note">
      {words.slice(0, -1).join(" ")} <Status value={words.at(-1) ?? ""} />
    </span>
  );
}
