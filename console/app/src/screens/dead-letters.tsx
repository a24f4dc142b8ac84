/** Dead letters, grouped by what went wrong; requeue one, a group, or all that match. */

import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useCallback, useState } from "react";
import { api, type DeadLetter } from "../api";
import { FilterBox } from "../components/filter-box";
import { Dialog, Empty, Failure, Loading, SameElsewhere, toast } from "../components/parts";
import { between, useTimes } from "../format";
import { commands, pythonLiteral } from "../lib/commands";
import { parseFilter, passes, valueOf, type FilterFields } from "../lib/filter";
import { grouped } from "../lib/letters";
import { failed, interval, queries } from "../live";
import { useTexts } from "../texts";

const PAGE = 200;
const LETTERS_MAX = 5_000;
const REQUEUE_AT_ONCE = 200;
const IDS_SHOWN = 20;

export function DeadLetters() {
  const t = useTexts();
  const { ago } = useTimes();
  const navigate = useNavigate();
  const { q = "" } = useSearch({ from: "/console/dead-letters" });
  const [asked, ask] = useState<DeadLetter[] | null>(null);
  const letters = useQuery({
    queryKey: ["dead-letters", "all"],
    queryFn: ({ signal }) => everyLetter(signal),
    refetchInterval: () => interval(false),
  });
  const all = letters.data?.items ?? [];
  const fields: FilterFields = {
    type: { values: distinct(all.map((one) => one.type)) },
    reason: { values: distinct(all.map((one) => one.reason_code)) },
    lifecycle: { values: distinct(all.map((one) => one.lifecycle)) },
    age: { duration: true },
  };
  const filter = parseFilter(q, fields);
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
          <button type="button" onClick={() => ask(matching)}>
            {t("dead.requeue.all", { n: matching.length })}
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
              <button type="button" className="primary" onClick={() => ask(group.letters)}>
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
                    <button type="button" className="small" aria-label={`${t("dead.requeue.one")} ${one.job_id}`} onClick={() => ask([one])}>
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
      {asked !== null && <Requeue letters={asked} onClose={() => ask(null)} />}
    </>
  );
}

async function everyLetter(signal: AbortSignal): Promise<{ items: DeadLetter[]; bounded: boolean }> {
  const items: DeadLetter[] = [];
  let cursor: string | null = null;
  do {
    const page: { items: DeadLetter[]; next_cursor: string | null } = await api.get("/dlq", { query: { limit: PAGE, cursor }, signal });
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor !== null && items.length < LETTERS_MAX);
  return { items, bounded: cursor !== null };
}

/** The exact number first, then the jobs in pieces, with what became of them. */
function Requeue({ letters, onClose }: { letters: DeadLetter[]; onClose: () => void }) {
  const t = useTexts();
  const [reason, setReason] = useState("");
  const [progress, setProgress] = useState<{ done: number; failed: number } | null>(null);
  const [error, setError] = useState<unknown>(null);
  const ids = letters.map((one) => one.job_id);
  const go = async () => {
    setError(null);
    const counted = { done: 0, failed: 0 };
    setProgress({ ...counted });
    try {
      for (let at = 0; at < ids.length; at += REQUEUE_AT_ONCE) {
        const answer = await api.post("/dlq/requeue", {
          body: { job_ids: ids.slice(at, at + REQUEUE_AT_ONCE), limit: REQUEUE_AT_ONCE, ...(reason === "" ? {} : { reason }) },
        });
        for (const one of answer.items) counted[one["status"] === undefined ? "failed" : "done"] += 1;
        setProgress({ ...counted });
      }
      toast(t("dead.progress", { ...counted, total: ids.length }));
      onClose();
    } catch (problem) {
      failed(problem);
      setError(problem);
    } finally {
      void queries.invalidateQueries({ queryKey: ["dead-letters"] });
      void queries.invalidateQueries({ queryKey: ["jobs"] });
    }
  };
  const isBusy = progress !== null && error === null;
  return (
    <Dialog title={t("dead.requeue.title", { n: ids.length })} onClose={onClose}>
      <p>{t("dead.requeue.note")}</p>
      <p className="mono quiet">{ids.slice(0, 3).join(", ") + (ids.length > 3 ? ", …" : "")}</p>
      <label htmlFor="requeue-reason">{t("common.reason")}</label>
      <input id="requeue-reason" value={reason} maxLength={500} onChange={(event) => setReason(event.target.value)} />
      {progress !== null && (
        <p role="status">
          <progress value={progress.done + progress.failed} max={ids.length} /> {t("dead.progress", { ...progress, total: ids.length })}
        </p>
      )}
      {error !== null && <Failure error={error} />}
      <div className="row end">
        <button type="button" data-focus="true" onClick={onClose}>
          {t("common.cancel")}
        </button>
        <button type="button" className="primary" disabled={isBusy} onClick={() => void go()}>
          {t("dead.requeue.group", { n: ids.length })}
        </button>
      </div>
      <SameElsewhere
        commands={commands({
          trellis: ["dlq", "requeue", ...ids.slice(0, IDS_SHOWN)],
          method: "POST",
          address: "/dlq/requeue",
          body: { job_ids: ids.slice(0, IDS_SHOWN) },
          python: `client.dead_letters.requeue(${pythonLiteral(ids.slice(0, IDS_SHOWN))})`,
        })}
      />
    </Dialog>
  );
}

const distinct = (values: string[]) => [...new Set(values)].sort();
