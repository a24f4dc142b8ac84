/** Proposals: what agents want changed, word by word, and the decision of a person. */

import { useInfiniteQuery, useMutation, useQuery, type UseQueryResult } from "@tanstack/react-query";
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { ProblemError } from "@trellis/client";
import { useEffect, useId, useRef, useState } from "react";
import { api, type Proposal, type ProposalDiff, type StepFile } from "../api";
import { Citations, DoubtfulQuotations } from "../components/citations";
import { ChangedSince } from "../components/conflict";
import { Diff } from "../components/diff";
import { Events } from "../components/events";
import { Dialog, Empty, Failure, Json, Loading, SameElsewhere, Status, toast, useKeys } from "../components/parts";
import { NewerRows } from "../components/table";
import { useTimes } from "../format";
import { commands, pythonLiteral } from "../lib/commands";
import { rowsBy } from "../lib/pages";
import { groundsOf, sourcesOf } from "../lib/proposals";
import { unseenIn, writtenOut } from "../lib/unseen";
import { failed, interval, queries, useSomeAgent } from "../live";
import { useTexts } from "../texts";
import { useStatusText } from "../texts-statuses";
import { StartRun } from "./runs";

export const STATUSES = ["pending", "approved", "applied", "failed", "rejected", "expired", "all"] as const;
export type ProposalStatus = (typeof STATUSES)[number];
const PAGE = 200;
const NOTE_MIN = 10;
const NOTE_MAX = 2_000;
const EVENTS_SHOWN = 200;
const DECIDABLE = new Set(["pending"]);

export function Proposals() {
  const t = useTexts();
  const nameOf = useStatusText();
  const navigate = useNavigate();
  const someAgent = useSomeAgent();
  const { status = "pending", id } = useSearch({ from: "/console/proposals" });
  const [decided, setDecided] = useState<string>();
  const asked = { limit: PAGE, ...(status === "all" ? {} : { status }), conflicts: status === "pending" || status === "all" };
  const queryKey = ["proposals", status];
  const listing = useInfiniteQuery({
    queryKey,
    meta: rowsBy("id", true),
    queryFn: ({ pageParam, signal }) => api.get("/proposals", { query: { ...asked, cursor: pageParam }, signal }),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor,
  });
  // What was just decided leaves the list of what waits at once, before the list is loaded again.
  const items = (listing.data?.pages ?? []).flatMap((page) => page.items).filter((one) => status !== "pending" || one.id !== decided);
  const shownId = id ?? items[0]?.id;
  const chosen = items.find((one) => one.id === shownId);
  const go = (next: { status?: ProposalStatus; id?: string }) =>
    void navigate({ to: "/console/proposals", search: { status, ...next }, replace: true });
  // Where the shown proposal stands, or stood before it left the list: the keys go on from there.
  const place = useRef(0);
  useEffect(() => {
    if (chosen !== undefined) place.current = items.indexOf(chosen);
  });
  const step = (by: number) => {
    const at = chosen !== undefined ? items.indexOf(chosen) : by > 0 ? place.current - 1 : place.current;
    const next = items[Math.min(Math.max(at + by, 0), items.length - 1)];
    if (next !== undefined) go({ id: next.id });
  };
  useKeys({ j: () => step(1), k: () => step(-1) });
  useEffect(() => {
    // The newest stands first: without an id in the address, each new proposal would take the place of the one being read.
    // This screen is still shown while another one is being loaded: then nobody is led back to it.
    if (id === undefined && shownId !== undefined && location.pathname.endsWith("/proposals")) go({ id: shownId });
  }, [id, shownId]);
  const list = useRef<HTMLUListElement>(null);
  useEffect(() => {
    list.current?.querySelector("[aria-current=true]")?.scrollIntoView({ block: "nearest" });
  }, [chosen?.id]);
  return (
    <>
      <div className="page-head">
        <h1>{t("proposals.title")}</h1>
        <div className="tabs" role="group" aria-label={t("runs.status")}>
          {STATUSES.map((one) => (
            <button key={one} type="button" className="small" title={one === "all" ? undefined : nameOf(one).title} aria-pressed={one === status} onClick={() => go({ status: one })}>
              {one === "all" ? t("proposals.all") : nameOf(one).text}
            </button>
          ))}
        </div>
      </div>
      <NewerRows queryKey={queryKey} />
      {listing.isPending ? (
        <Loading />
      ) : listing.data === undefined ? (
        <Failure error={listing.error} retry={() => void listing.refetch()} />
      ) : shownId === undefined ? (
        status === "pending" ? (
          <Empty title={t("proposals.empty")} hint={t("proposals.empty.hint")} command={`trellis run ${someAgent}`} />
        ) : (
          <Empty title={t("proposals.empty.status")} />
        )
      ) : (
        <div className="inbox">
          <ul className="inbox-list" ref={list} aria-label={t("proposals.title")}>
            {items.map((one) => (
              <li key={one.id}>
                <button type="button" aria-current={one.id === chosen?.id} onClick={() => go({ id: one.id })}>
                  <span className="summary">{summaryOf(one)}</span>
                  <span className="target mono">{writtenOut(one.target)}</span>
                  <span className="row">
                    <Status value={one.status} />
                    <span className="quiet">{one.agent_slug}</span>
                    {one.conflict != null && <span className="badge bad">!</span>}
                    {groundsOf(one).flags.length > 0 && (
                      <span className="badge warn" title={groundsOf(one).flags.map(writtenOut).join(", ")}>
                        {t("proposals.flagged")}
                      </span>
                    )}
                  </span>
                </button>
              </li>
            ))}
            {listing.hasNextPage && (
              <li>
                <button type="button" disabled={listing.isFetchingNextPage} onClick={() => void listing.fetchNextPage()}>
                  {t("common.more")}
                </button>
              </li>
            )}
          </ul>
          <ProposalView
            key={shownId}
            id={shownId}
            onDecided={() => {
              setDecided(shownId);
              const at = chosen === undefined ? -1 : items.indexOf(chosen);
              const next = items[at + 1] ?? items[at - 1];
              if (status === "pending") go(next === undefined ? {} : { id: next.id });
            }}
          />
        </div>
      )}
    </>
  );
}

export function summaryOf(proposal: Proposal): string {
  const summary = proposal.content["summary"];
  return writtenOut(typeof summary === "string" && summary !== "" ? summary : `${proposal.action} ${proposal.target}`);
}

/** What a person is about to decide, on the version of the proposal that was shown when the dialog was opened. */
interface Deciding {
  what: "approve" | "reject";
  version: number;
}

/** One proposal. Its key is its id, so an open dialog never becomes the dialog of another proposal. */
function ProposalView({ id, onDecided }: { id: string; onDecided: () => void }) {
  const t = useTexts();
  const { full, ago } = useTimes();
  const one = useQuery({
    queryKey: ["proposal", id],
    queryFn: ({ signal }) => api.get("/proposals/{proposal_id}", { path: { proposal_id: id }, signal }),
    refetchInterval: (query) => interval(DECIDABLE.has(query.state.data?.status ?? "pending")),
  });
  const proposal = one.data;
  const isOpen = proposal !== undefined && DECIDABLE.has(proposal.status);
  const diff = useQuery({
    queryKey: ["proposal", id, "diff", proposal?.version],
    queryFn: ({ signal }) => api.get("/proposals/{proposal_id}/diff", { path: { proposal_id: id }, signal }),
    enabled: isOpen,
  });
  const history = useQuery({
    queryKey: ["proposal", id, "events", proposal?.version],
    queryFn: ({ signal }) => api.get("/events", { query: { job_id: id, limit: EVENTS_SHOWN }, signal }),
    enabled: proposal !== undefined,
  });
  const runId = typeof proposal?.source["run_id"] === "string" ? proposal.source["run_id"] : null;
  const steps = useQuery({
    queryKey: ["run", runId, "steps"],
    queryFn: ({ signal }) => api.get("/runs/{run_id}/steps", { path: { run_id: runId ?? "" }, signal }),
    enabled: runId !== null,
    staleTime: 60_000,
  });
  const isBehind = diff.data !== undefined && proposal !== undefined && diff.data.version > proposal.version;
  useEffect(() => {
    if (isBehind) void one.refetch();
  }, [isBehind]);
  const [again, runAgain] = useState(false);
  const [deciding, setDeciding] = useState<Deciding | null>(null);
  const conflict = diff.data?.conflict ?? proposal?.conflict ?? null;
  const decide = (what: Deciding["what"]) => isOpen && deciding === null && setDeciding({ what, version: proposal.version });
  useKeys({ a: () => conflict === null && decide("approve"), r: () => decide("reject") });
  if (proposal === undefined) {
    return one.isPending ? <Loading /> : <Failure error={one.error} retry={() => void one.refetch()} />;
  }
  return (
    <article aria-label={summaryOf(proposal)}>
      <div className="actions">
        <span className="grow">
          <strong>{summaryOf(proposal)}</strong>
        </span>
        <Status value={proposal.status} />
        {proposal.requiresHumanReview && <span className="badge warn">{t("proposals.review")}</span>}
        {isOpen && (
          <>
            <button type="button" className="primary" disabled={conflict !== null} onClick={() => decide("approve")}>
              {t("proposals.approve")} <kbd>a</kbd>
            </button>
            <button type="button" className="danger" onClick={() => decide("reject")}>
              {t("proposals.reject")} <kbd>r</kbd>
            </button>
          </>
        )}
      </div>
      {conflict !== null && (
        <div className="banner bad" role="alert">
          <p>{t("proposals.conflict", { why: conflict })}</p>
          <button type="button" onClick={() => runAgain(true)}>
            {t("proposals.again", { slug: proposal.agent_slug })}
          </button>
        </div>
      )}
      {conflict !== null && <ChangedSince proposal={proposal} steps={steps.data?.items ?? []} />}
      <Doubts proposal={proposal} diff={diff.data} />
      <section className="card">
        <h2>{t("proposals.change")}</h2>
        {isOpen && diff.data !== undefined && <Exclusions diff={diff.data} />}
        {isOpen && diff.isPending ? (
          <Loading />
        ) : diff.error !== null ? (
          <Failure error={diff.error} retry={() => void diff.refetch()} />
        ) : (
          diff.data?.diff != null && <Diff unified={diff.data.diff} />
        )}
        {!(isOpen && diff.isPending) && diff.data?.diff == null && (
          <>
            <p className="quiet">{t(diff.error === null ? "proposals.change.none" : "proposals.change.refused")}</p>
            <pre className="json">{writtenOut(proposedText(proposal))}</pre>
          </>
        )}
      </section>
      <Grounds proposal={proposal} steps={steps.data?.items ?? []} />
      <section className="card">
        <h2>{t("proposals.origin")}</h2>
        <dl className="facts">
          <dt>{t("proposals.agent")}</dt>
          <dd>
            <Link to="/console/agents/$slug" params={{ slug: proposal.agent_slug }}>
              {proposal.agent_slug}
            </Link>
          </dd>
          {runId !== null && (
            <>
              <dt>{t("proposals.run")}</dt>
              <dd>
                <Link to="/console/runs/$runId" params={{ runId }}>
                  {runId}
                </Link>
              </dd>
            </>
          )}
          <dt>{t("proposals.by")}</dt>
          <dd>
            {String(proposal.source["identity"] ?? "–")} <span className="quiet">({String(proposal.source["type"] ?? "–")})</span>
          </dd>
          <dt>{t("proposals.priority")}</dt>
          <dd>{proposal.priority}</dd>
          {typeof proposal.content["expected_version"] === "number" && (
            <>
              <dt>{t("proposals.made.for")}</dt>
              <dd>
                <Link to="/console/agents/$slug" params={{ slug: proposal.agent_slug }} search={{ part: "history" }}>
                  {t("proposals.made.memory", { version: proposal.content["expected_version"] })}
                </Link>
              </dd>
            </>
          )}
          {proposal.target_hash !== null && (
            <>
              <dt>{t("proposals.made.for")}</dt>
              <dd className="mono">sha256 {proposal.target_hash}</dd>
            </>
          )}
          <dt>{t("proposals.target")}</dt>
          <dd className="mono">{writtenOut(`${proposal.action} ${proposal.target}`)}</dd>
          <dt>{t("proposals.created")}</dt>
          <dd>
            {full(proposal.created_at)} <span className="quiet">({ago(proposal.created_at)})</span>
          </dd>
          {isOpen && (
            <>
              <dt>{t("proposals.expires")}</dt>
              <dd>{ago(proposal.expires_at)}</dd>
            </>
          )}
          {proposal.approval !== null && (
            <>
              <dt>{t("proposals.decided")}</dt>
              <dd>
                {String(proposal.approval["decided_by"])}
                {proposal.approval["decision_note"] != null && `: ${String(proposal.approval["decision_note"])}`}
              </dd>
            </>
          )}
          {proposal.apply_result !== null && (
            <>
              <dt>{t("proposals.applied")}</dt>
              <dd className="mono">
                {String(proposal.apply_result["error"] ?? proposal.apply_result["git_commit"] ?? proposal.apply_result["object_key"] ?? "")}
              </dd>
            </>
          )}
        </dl>
        <Json value={proposal} title={t("common.raw")} />
      </section>
      <section className="card">
        <h2>{t("proposals.history")}</h2>
        {history.error !== null ? <Failure error={history.error} retry={() => void history.refetch()} /> : <Events first={EVENTS_SHOWN} items={history.data?.items ?? []} />}
      </section>
      <SameElsewhere
        commands={commands({
          trellis: ["proposals", "show", id],
          address: `/proposals/${id}`,
          python: `print(client.proposals.get(${pythonLiteral(id)}))`,
        })}
      />
      {again && <StartRun agent={proposal.agent_slug} onClose={() => runAgain(false)} />}
      {deciding !== null && (
        <Decision
          proposal={proposal}
          what={deciding.what}
          version={deciding.version}
          diff={diff}
          conflict={conflict}
          onClose={() => setDeciding(null)}
          onDecided={onDecided}
        />
      )}
    </article>
  );
}

function proposedText(proposal: Proposal): string {
  const change = proposal.content["change"];
  if (typeof change === "object" && change !== null && "text" in change && typeof change.text === "string") return change.text;
  const updates = proposal.content["updates"];
  if (Array.isArray(updates)) {
    return updates.map((one: Record<string, unknown>) => `${String(one["file"])}: ${String(one["operation"])}\n${String(one["content"] ?? "")}`).join("\n\n");
  }
  return JSON.stringify(proposal.content, null, 2);
}

/** All that is proposed, for a change that has no text to compare. */
function WholeContent({ proposal }: { proposal: Proposal }) {
  return (
    <pre className="json" tabIndex={0}>
      {writtenOut(JSON.stringify(proposal.content, null, 2))}
    </pre>
  );
}

/** What a person should know before the decision: what the platform could not confirm, and characters that cannot be seen. */
function Doubts({ proposal, diff }: { proposal: Proposal; diff: ProposalDiff | undefined }) {
  const t = useTexts();
  const { flags, notFound } = groundsOf(proposal);
  const unseen = unseenIn([proposal.action, proposal.target, proposal.content, diff?.diff]);
  return (
    <>
      {flags.length > 0 && (
        <div className="banner warn" role="note">
          <p>{t("proposals.flags", { flags: flags.map(writtenOut).join(", ") })}</p>
          {notFound.map((one, at) => (
            <p key={at}>{t("proposals.flags.quotation", { ref: writtenOut(one.ref), excerpt: writtenOut(one.excerpt) })}</p>
          ))}
        </div>
      )}
      {(diff?.source_warnings ?? []).map((text, at) => (
        <p key={at} className="banner warn" role="note">
          {writtenOut(text)}
        </p>
      ))}
      {unseen.length > 0 && <p className="banner warn">{t("proposals.unseen", { characters: unseen.join(", ") })}</p>}
    </>
  );
}

/** Which other pending proposals can no longer be applied after this one, and after which this one cannot. */
function Exclusions({ diff }: { diff: ProposalDiff }) {
  const t = useTexts();
  const [rulesOut, ruledOutBy] = [diff.rules_out ?? [], diff.ruled_out_by ?? []];
  const both = rulesOut.filter((one) => ruledOutBy.includes(one));
  const ids = {
    both,
    out: rulesOut.filter((one) => !both.includes(one)),
    by: ruledOutBy.filter((one) => !both.includes(one)),
  };
  return (["both", "out", "by"] as const)
    .filter((one) => ids[one].length > 0)
    .map((one) => (
      <p key={one} className="banner">
        {t(`proposals.excludes.${one}`, { ids: ids[one].join(", ") })}
      </p>
    ));
}

/** The exact change, and the confirmation. The focus is on the way back: Enter alone decides nothing. */
function Decision({
  proposal,
  what,
  version,
  diff,
  conflict,
  onClose,
  onDecided,
}: {
  proposal: Proposal;
  what: "approve" | "reject";
  version: number;
  diff: UseQueryResult<ProposalDiff>;
  conflict: string | null;
  onClose: () => void;
  onDecided: () => void;
}) {
  const t = useTexts();
  const [note, setNote] = useState("");
  const field = useId();
  const sent = useMutation({
    mutationFn: () =>
      api.patch("/proposals/{proposal_id}", {
        path: { proposal_id: proposal.id },
        body: { decision: what, note: what === "reject" ? note : null },
        ifMatch: `"${version}"`,
      }),
    onSuccess: () => {
      toast(t(`proposals.done.${what}`, { id: proposal.id }));
      onClose();
      onDecided();
    },
    onError: failed,
    onSettled: () => {
      void queries.invalidateQueries({ queryKey: ["proposals"] });
      void queries.invalidateQueries({ queryKey: ["proposal", proposal.id] });
    },
  });
  const isStale = proposal.version !== version || !DECIDABLE.has(proposal.status);
  const isShown = diff.isSuccess && diff.data.version === version;
  const isOurs = sent.isPending || sent.isSuccess;
  useEffect(() => {
    if (!isStale || isOurs) return;
    toast(t("proposals.meanwhile", { id: proposal.id }));
    onClose();
  }, [isStale, isOurs]);
  const isChanged = sent.error instanceof ProblemError && sent.error.status === 412;
  const missing = what === "reject" ? NOTE_MIN - note.trim().length : 0;
  return (
    <Dialog title={t(`proposals.${what}.title`)} onClose={onClose}>
      <p className="mono">{writtenOut(`${proposal.action} ${proposal.target}`)}</p>
      {what === "approve" && <p className="quiet">{t("proposals.approve.version", { version, id: proposal.id })}</p>}
      {what === "approve" && <Doubts proposal={proposal} diff={diff.data} />}
      {what === "approve" && conflict !== null && <p className="banner bad">{t("proposals.conflict", { why: conflict })}</p>}
      {what === "approve" &&
        (isShown ? (
          <>
            <Exclusions diff={diff.data} />
            {diff.data.diff !== null ? <Diff unified={diff.data.diff} /> : <WholeContent proposal={proposal} />}
          </>
        ) : diff.error !== null && !diff.isFetching ? (
          <Failure error={diff.error} retry={() => void diff.refetch()} />
        ) : (
          <Loading />
        ))}
      {what === "reject" && (
        <>
          <label htmlFor={field}>{t("proposals.note")}</label>
          <textarea id={field} data-focus="true" value={note} maxLength={NOTE_MAX} onChange={(event) => setNote(event.target.value)} />
          {missing > 0 && <p className="quiet">{t("proposals.note.short", { n: missing })}</p>}
        </>
      )}
      {isChanged ? <p className="banner bad">{t("proposals.changed")}</p> : sent.error !== null && <Failure error={sent.error} />}
      <div className="row end">
        <button type="button" data-focus={what === "approve"} onClick={onClose}>
          {t("common.cancel")}
        </button>
        <button
          type="button"
          className={what === "approve" ? "primary" : "danger"}
          disabled={isStale || sent.isPending || missing > 0 || (what === "approve" && (conflict !== null || !isShown))}
          onClick={() => sent.mutate()}
        >
          {t(`proposals.${what}`)}
        </button>
      </div>
      <SameElsewhere
        commands={commands({
          trellis: ["proposals", what, proposal.id, ...(what === "reject" ? ["--note", note || "…"] : [])],
          method: "PATCH",
          address: `/proposals/${proposal.id}`,
          headers: { "If-Match": `"${version}"` },
          body: { decision: what, note: what === "reject" ? note || "…" : null },
          python: `client.proposals.${what}(${pythonLiteral(proposal.id)}${what === "reject" ? `, ${pythonLiteral(note || "…")}` : ""}, version=${version})`,
        })}
      />
    </Dialog>
  );
}

/** Why, with each citation compared word for word with the source that the run has read. */
function Grounds({ proposal, steps }: { proposal: Proposal; steps: StepFile[] }) {
  const t = useTexts();
  const grounds = groundsOf(proposal);
  const sources = new Map<string, string>();
  for (const { ref, text } of sourcesOf(steps)) if (typeof ref === "string" && typeof text === "string") sources.set(ref, text);
  return (
    <section className="card">
      <h2>{t("proposals.why")}</h2>
      {grounds.reasons.map((one) => (
        <p key={one}>{one}</p>
      ))}
      <h3>{t("proposals.citations")}</h3>
      <Citations items={grounds.citations} sources={sources} />
      <DoubtfulQuotations items={grounds.notFound} title={t("proposals.not.found")} />
      <DoubtfulQuotations items={grounds.notRead} title={t("proposals.not.read")} />
    </section>
  );
}
