/** Dead letters, grouped by what went wrong; requeue one, a group, or all that match. */

import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useCallback, useEffect, useRef, useState } from "react";
import { api, type DeadLetter } from "../api";
import { FilterBox } from "../components/filter-box";
import { Dialog, Empty, Failure, Loading, SameElsewhere, toast } from "../components/parts";
import { between, useTimes } from "../format";
import { commands, optionsOf, pythonArguments, pythonLiteral } from "../lib/commands";
import { parseFilter, passes, valueOf, type FilterFields } from "../lib/filter";
import { filterOfGroup, gatewayFilter, grouped, requeueCounted, type LetterFilter, type Progress } from "../lib/letters";
import { allLetters, LETTERS_MAX, LETTERS_PAGE, useIsTypeOfLetters, useLetters } from "../letters";
import { failed, queries } from "../live";
import { useTexts } from "../texts";

/** How many letters the dry run counts before it says "or more". */
const COUNTED_MAX = 20_000;
const REQUEUE_AT_ONCE = 200;
const IDS_SHOWN = 20;

const LIFECYCLES = ["leased-job", "queue-job"] as const;
const REASONS: readonly DeadLetter["reason_code"][] = [
  "parse_error",
  "validation_failed",
  "dependency_unavailable",
  "timeout",
  "exhausted_retries",
  "policy_violation",
  "infrastructure_failure",
  "compensation_failed",
];

/** Jobs by their ids, or all that the gateway selects by a filter. `same` selects just these many ids, for a short command. */
type Asked = { ids: string[]; same?: LetterFilter | null } | { filter: LetterFilter };

export function DeadLetters() {
  const t = useTexts();
  const { ago } = useTimes();
  const navigate = useNavigate();
  const { q = "" } = useSearch({ from: "/console/dead-letters" });
  const [asked, ask] = useState<Asked | null>(null);
  const queues = useQuery({ queryKey: ["queues"], queryFn: ({ signal }) => api.get("/queues", { signal }), staleTime: 30_000, retry: false });
  const types = distinct((queues.data?.items ?? []).map((one) => one.type));
  const reasons = { reason: REASONS as readonly string[], lifecycle: LIFECYCLES as readonly string[] };
  const fields: FilterFields = { type: { values: types }, reason: { values: reasons.reason }, lifecycle: { values: reasons.lifecycle }, age: { duration: true } };
  const filter = parseFilter(q, fields);
  const typed = valueOf(filter, "type");
  const isListed = typed === undefined || types.includes(typed);
  const named = useIsTypeOfLetters(isListed || queues.isPending ? undefined : typed);
  // Until the type is known, nobody can say whether the gateway evaluates the whole filter.
  const isOpen = !isListed && (queues.isPending || named.isPending);
  const known = { type: named.data === true && typed !== undefined ? [...types, typed] : types, ...reasons };
  const whole = gatewayFilter(filter, known);
  const { listing, items: all, isBounded, isWhole } = useLetters(whole ?? {}, !isOpen);
  const matching = all.filter((one) =>
    passes(filter, { type: one.type, reason: one.reason_code, lifecycle: one.lifecycle, age: between(one.at, Date.now()), error: one.last_error, id: one.job_id }),
  );
  const search = useCallback(
    (text: string) => void navigate({ to: "/console/dead-letters", search: text === "" ? {} : { q: text }, replace: true }),
    [navigate],
  );
  // What the gateway cannot compare (words, ages) is left out of the commands that list.
  const listed = gatewayFilter({ ...filter, words: [], unknown: [], terms: filter.terms.filter((term) => known[term.field as keyof typeof known]?.includes(term.value)) }, known) ?? {};
  return (
    <>
      <div className="page-head">
        <h1>{t("dead.title")}</h1>
        <FilterBox value={q} onChange={search} fields={fields} filter={filter} example="reason:exhausted_retries type:mail.send age>1h" />
        {matching.length > 0 && (
          <button
            type="button"
            disabled={isOpen || (whole === null && !isWhole && !isBounded)}
            onClick={() => ask(whole === null ? { ids: matching.map((one) => one.job_id) } : { filter: whole })}
          >
            {t("dead.requeue.all", { n: isWhole || (isBounded && whole === null) ? matching.length : `${matching.length}+` })}
          </button>
        )}
      </div>
      {isBounded && <p className="banner">{t("dead.bounded", { n: LETTERS_MAX })}</p>}
      {listing.isFetchNextPageError && <Failure error={listing.error} retry={() => void listing.fetchNextPage()} />}
      {listing.isPending ? (
        <Loading />
      ) : listing.data === undefined ? (
        <Failure error={listing.error} retry={() => void listing.refetch()} />
      ) : matching.length === 0 ? (
        <Empty title={t("dead.empty")} hint={t("dead.empty.hint")} command="trellis dlq list" />
      ) : (
        grouped(matching).map((group) => (
          <section key={group.key} className="card" aria-label={group.error}>
            <div className="row">
              <span className="badge bad">{group.reason_code}</span>
              <code>{group.type}</code>
              <strong>{t("dead.group", { n: group.letters.length })}</strong>
              <span className="quiet">
                {t("dead.last")}: {ago(group.letters[0]?.at ?? "")}
              </span>
              <span className="grow" />
              <button type="button" className="primary" onClick={() => ask({ ids: group.letters.map((one) => one.job_id), same: !isWhole || group.letters.length <= IDS_SHOWN ? null : filterOfGroup(group, all, whole ?? {}) })}>
                {t("dead.requeue.group", { n: group.letters.length })}
              </button>
            </div>
            <pre className="json">{group.letters[0]?.last_error}</pre>
            <details>
              <summary>{t("dead.group", { n: group.letters.length })}</summary>
              <ul>
                {group.letters.slice(0, IDS_SHOWN).map((one) => (
                  <li key={one.job_id}>
                    <Link to="/console/jobs/$jobId" params={{ jobId: one.job_id }} className="mono">
                      {one.job_id}
                    </Link>{" "}
                    <span className="quiet">{ago(one.at)}</span>{" "}
                    <button type="button" className="small" aria-label={`${t("dead.requeue.one")} ${one.job_id}`} onClick={() => ask({ ids: [one.job_id] })}>
                      {t("dead.requeue.one")}
                    </button>
                  </li>
                ))}
              </ul>
              {group.letters.length > IDS_SHOWN && <p className="quiet">+ {group.letters.length - IDS_SHOWN}</p>}
            </details>
          </section>
        ))
      )}
      <SameElsewhere
        commands={commands({
          trellis: ["dlq", "list", ...optionsOf({ type: listed.type, reason: listed.reason_code, lifecycle: listed.lifecycle, limit: LETTERS_PAGE })],
          address: `/dlq?${new URLSearchParams({ ...(listed as Record<string, string>), limit: String(LETTERS_PAGE) })}`,
          python: `print(client.dead_letters.list(${pythonArguments({ ...pythonFilter(listed), limit: LETTERS_PAGE })}).items)`,
        })}
      />
      {asked !== null && <Requeue asked={asked} onClose={() => ask(null)} />}
    </>
  );
}

/** The number first, then the jobs in pieces, with what became of them. Whoever stops or leaves it ends it. */
function Requeue({ asked, onClose }: { asked: Asked; onClose: () => void }) {
  const t = useTexts();
  const [reason, setReason] = useState("");
  const [progress, setProgress] = useState<Progress | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [isBusy, setBusy] = useState(false);
  const [isStopped, setStopped] = useState(false);
  const running = useRef<AbortController | null>(null);
  useEffect(() => () => running.current?.abort(), []);
  const filter = "filter" in asked ? asked.filter : null;
  const counted = useQuery({
    queryKey: ["dead-letters-counted", filter],
    queryFn: ({ signal }) => allLetters(filter ?? {}, COUNTED_MAX, signal),
    enabled: filter !== null && progress === null,
    gcTime: 0,
    staleTime: Number.POSITIVE_INFINITY,
  });
  const ids = "ids" in asked ? asked.ids : (counted.data?.items ?? []).map((one) => one.job_id);
  const total = ids.length;
  const shown = counted.data?.bounded === true ? `${total}+` : total;
  const go = async () => {
    const stop = new AbortController();
    running.current = stop;
    setError(null);
    setBusy(true);
    let last: Progress = { done: 0, failed: 0 };
    const report = (now: Progress) => setProgress((last = now));
    report(last);
    try {
      const done = await requeueCounted(
        total,
        REQUEUE_AT_ONCE,
        filter === null ? "ids" : "filter",
        async (from, limit) => {
          const which = filter === null ? { job_ids: ids.slice(from, from + limit) } : { filter: filter as object };
          const body = { ...which, limit, ...(reason === "" ? {} : { reason }) };
          return (await api.post("/dlq/requeue", { body, signal: stop.signal })).items;
        },
        report,
        stop.signal,
      );
      toast(t("dead.progress", { ...done, total }));
      onClose();
    } catch (problem) {
      if (stop.signal.aborted) {
        toast(t("dead.progress", { ...last, total }));
        return setStopped(true);
      }
      failed(problem);
      setError(problem);
    } finally {
      setBusy(false);
      void queries.invalidateQueries({ queryKey: ["dead-letters"] });
      void queries.invalidateQueries({ queryKey: ["jobs"] });
    }
  };
  return (
    <Dialog title={counted.isLoading ? t("dead.requeue.counting") : t("dead.requeue.title", { n: shown })} onClose={onClose}>
      {counted.isLoading && <Loading />}
      {counted.error !== null && <Failure error={counted.error} retry={() => void counted.refetch()} />}
      <p>{counted.data?.bounded === true ? t("dead.requeue.note.bounded", { n: total }) : t("dead.requeue.note")}</p>
      {filter !== null && <p className="mono">{filterOptions(filter).join(" ")}</p>}
      <p className="mono quiet">{ids.slice(0, 3).join(", ") + (total > 3 ? ", …" : "")}</p>
      <label htmlFor="requeue-reason">{t("common.reason")}</label>
      <input id="requeue-reason" value={reason} maxLength={500} onChange={(event) => setReason(event.target.value)} />
      {progress !== null && (
        <p role="status">
          <progress value={progress.done + progress.failed} max={total} /> {t("dead.progress", { ...progress, total })}
        </p>
      )}
      {isStopped && <p role="status">{t("dead.stopped", { n: REQUEUE_AT_ONCE })}</p>}
      {error !== null && <Failure error={error} />}
      <div className="row end">
        <button type="button" data-focus="true" onClick={isBusy ? () => running.current?.abort() : onClose}>
          {isBusy ? t("dead.stop") : t("common.cancel")}
        </button>
        <button type="button" className="primary" disabled={isBusy || isStopped || total === 0} onClick={() => void go()}>
          {t("dead.requeue.group", { n: shown })}
        </button>
      </div>
      {total > 0 && <SameElsewhere commands={requeueCommands(ids, filter ?? ("same" in asked ? (asked.same ?? null) : null), reason)} />}
    </Dialog>
  );
}

/** The same act elsewhere: no more jobs than are asked for here, in as many requests as the gateway needs. */
function requeueCommands(ids: string[], filter: LetterFilter | null, reason: string) {
  const why = reason === "" ? {} : { reason };
  const starts = Array.from({ length: Math.max(1, Math.ceil(ids.length / REQUEUE_AT_ONCE)) }, (_, at) => at * REQUEUE_AT_ONCE);
  const chosen = filter === null ? pythonLiteral(ids) : `[one.job_id for one in client.dead_letters.list(${pythonArguments({ ...pythonFilter(filter), limit: ids.length })}).items]`;
  const which = filter === null ? ids : [...filterOptions(filter), "--yes", "--limit", String(ids.length)];
  return commands({
    trellis: ["dlq", "requeue", ...which, ...optionsOf({ cause: reason })],
    method: "POST",
    address: "/dlq/requeue",
    bodies: starts.map((from) => {
      const piece = ids.slice(from, from + REQUEUE_AT_ONCE);
      return filter === null ? { job_ids: piece, ...why } : { filter, limit: piece.length, ...why };
    }),
    python: [
      `ids = ${chosen}`,
      `for first in range(0, len(ids), ${REQUEUE_AT_ONCE}):`,
      `    print(client.dead_letters.requeue(ids[first : first + ${REQUEUE_AT_ONCE}]${reason === "" ? "" : `, reason=${pythonLiteral(reason)}`}))`,
    ].join("\n"),
  });
}

function pythonFilter(filter: LetterFilter) {
  return { type_: filter.type, reason: filter.reason_code, lifecycle: filter.lifecycle };
}

function filterOptions(filter: LetterFilter): string[] {
  const options = optionsOf({ type: filter.type, reason: filter.reason_code, lifecycle: filter.lifecycle });
  return options.length === 0 ? ["--all"] : options;
}

const distinct = (values: string[]) => [...new Set(values)].sort();
