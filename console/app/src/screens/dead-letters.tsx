/** Dead letters, grouped by what went wrong; requeue one, a group, or all that match. */

import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useCallback, useEffect, useRef, useState } from "react";
import { api, type DeadLetter } from "../api";
import { FilterBox } from "../components/filter-box";
import { Dialog, Empty, Failure, Loading, SameElsewhere, toast } from "../components/parts";
import { between, useTimes } from "../format";
import { commands, pythonLiteral } from "../lib/commands";
import { parseFilter, passes, valueOf, type FilterFields } from "../lib/filter";
import { gatewayFilter, grouped, requeueCounted, type LetterFilter, type Progress } from "../lib/letters";
import { failed, interval, queries } from "../live";
import { useTexts } from "../texts";

const PAGE = 200;
const LETTERS_MAX = 5_000;
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

/** Jobs by their ids, or all that the gateway selects by a filter. */
type Asked = { ids: string[] } | { filter: LetterFilter };

export function DeadLetters() {
  const t = useTexts();
  const { ago } = useTimes();
  const navigate = useNavigate();
  const { q = "" } = useSearch({ from: "/console/dead-letters" });
  const [asked, ask] = useState<Asked | null>(null);
  const queues = useQuery({ queryKey: ["queues"], queryFn: ({ signal }) => api.get("/queues", { signal }), staleTime: 30_000, retry: false });
  const known = {
    type: distinct((queues.data?.items ?? []).map((one) => one.type)),
    reason: REASONS as readonly string[],
    lifecycle: LIFECYCLES as readonly string[],
  };
  const fields: FilterFields = { ...Object.fromEntries(Object.entries(known).map(([name, values]) => [name, { values }])), age: { duration: true } };
  const filter = parseFilter(q, fields);
  const whole = gatewayFilter(filter, known);
  const letters = useQuery({
    queryKey: ["dead-letters", "some", whole ?? {}],
    queryFn: ({ signal }) => lettersOf(whole ?? {}, LETTERS_MAX, signal),
    refetchInterval: () => interval(false),
    placeholderData: (before) => before,
  });
  const all = letters.data?.items ?? [];
  const matching = all.filter((one) =>
    passes(filter, { type: one.type, reason: one.reason_code, lifecycle: one.lifecycle, age: between(one.at, Date.now()), error: one.last_error, id: one.job_id }),
  );
  const search = useCallback(
    (text: string) => void navigate({ to: "/console/dead-letters", search: text === "" ? {} : { q: text }, replace: true }),
    [navigate],
  );
  const type = valueOf(filter, "type");
  const reason = valueOf(filter, "reason");
  return (
    <>
      <div className="page-head">
        <h1>{t("dead.title")}</h1>
        <FilterBox value={q} onChange={search} fields={fields} filter={filter} example="reason:exhausted_retries type:mail.send age>1h" />
        {matching.length > 0 && (
          <button type="button" onClick={() => ask(whole === null ? { ids: matching.map((one) => one.job_id) } : { filter: whole })}>
            {t("dead.requeue.all", { n: letters.data?.bounded === true && whole !== null ? `${matching.length}+` : matching.length })}
          </button>
        )}
      </div>
      {letters.data?.bounded === true && <p className="banner">{t("dead.bounded", { n: LETTERS_MAX })}</p>}
      {letters.isPending ? (
        <Loading />
      ) : letters.data === undefined ? (
        <Failure error={letters.error} retry={() => void letters.refetch()} />
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
              <button type="button" className="primary" onClick={() => ask({ ids: group.letters.map((one) => one.job_id) })}>
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
          trellis: ["dlq", "list", ...(type ? ["--type", type] : []), ...(reason ? ["--reason", reason] : [])],
          address: `/dlq?${new URLSearchParams({ ...(type ? { type } : {}), ...(reason ? { reason_code: reason } : {}), limit: String(PAGE) })}`,
          python: "print(client.dead_letters.list().items)",
        })}
      />
      {asked !== null && <Requeue asked={asked} onClose={() => ask(null)} />}
    </>
  );
}

/** The newest letters that the gateway selects; `bounded` if there are more. */
async function lettersOf(filter: LetterFilter, most: number, signal: AbortSignal): Promise<{ items: DeadLetter[]; bounded: boolean }> {
  const items: DeadLetter[] = [];
  let cursor: string | null = null;
  do {
    const page: { items: DeadLetter[]; next_cursor: string | null } = await api.get("/dlq", {
      query: { limit: PAGE, cursor, ...(filter as object) },
      signal,
    });
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor !== null && items.length < most);
  return { items, bounded: cursor !== null };
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
    queryFn: ({ signal }) => lettersOf(filter ?? {}, COUNTED_MAX, signal),
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
  const named = ids.slice(0, IDS_SHOWN);
  const options = filter === null ? named : optionsOf(filter);
  return (
    <Dialog title={counted.isLoading ? t("dead.requeue.counting") : t("dead.requeue.title", { n: shown })} onClose={onClose}>
      {counted.isLoading && <Loading />}
      {counted.error !== null && <Failure error={counted.error} retry={() => void counted.refetch()} />}
      <p>{counted.data?.bounded === true ? t("dead.requeue.note.bounded", { n: total }) : t("dead.requeue.note")}</p>
      {filter !== null && <p className="mono">{optionsOf(filter).join(" ")}</p>}
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
      <SameElsewhere
        commands={commands({
          trellis: ["dlq", "requeue", ...options, ...(filter === null ? [] : ["--yes"]), ...(reason === "" ? [] : ["--cause", reason])],
          method: "POST",
          address: "/dlq/requeue",
          body: { ...(filter === null ? { job_ids: named } : { filter, limit: REQUEUE_AT_ONCE }), ...(reason === "" ? {} : { reason }) },
          python: `print(client.dead_letters.requeue(${filter === null ? pythonLiteral(named) : `[one.job_id for one in client.dead_letters.list(${pythonArguments(filter)}).items]`}))`,
        })}
      />
    </Dialog>
  );
}

function pythonArguments(filter: LetterFilter): string {
  const named = { type_: filter.type, reason: filter.reason_code, lifecycle: filter.lifecycle, limit: REQUEUE_AT_ONCE };
  return Object.entries(named)
    .filter(([, value]) => value !== undefined)
    .map(([name, value]) => `${name}=${pythonLiteral(value)}`)
    .join(", ");
}

function optionsOf(filter: LetterFilter): string[] {
  const options = [
    ...(filter.type === undefined ? [] : ["--type", filter.type]),
    ...(filter.reason_code === undefined ? [] : ["--reason", filter.reason_code]),
    ...(filter.lifecycle === undefined ? [] : ["--lifecycle", filter.lifecycle]),
  ];
  return options.length === 0 ? ["--all"] : options;
}

const distinct = (values: string[]) => [...new Set(values)].sort();
