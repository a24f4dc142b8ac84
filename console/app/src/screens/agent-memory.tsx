/** What an agent remembers: both layers, and the changes with what each of them changed. */

import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useState } from "react";
import { api, type MemoryChange } from "../api";
import { Diff } from "../components/diff";
import { Failure, Loading, SameElsewhere } from "../components/parts";
import { useTimes } from "../format";
import { commands, pythonLiteral } from "../lib/commands";
import { useTexts } from "../texts";

const DEEP = ["decisions", "timeline", "runs"] as const;
const DEEP_PAGE = 5;
const HISTORY_PAGE = 50;

export function Memory({ slug }: { slug: string }) {
  const t = useTexts();
  const { full } = useTimes();
  const memory = useQuery({
    queryKey: ["memory", slug],
    queryFn: ({ signal }) => api.get("/memory/{agent_id}/read", { path: { agent_id: slug }, query: { mode: "wide" }, signal }),
  });
  return (
    <>
      <section className="card">
        <h2>{t("agents.memory.one")}</h2>
        {memory.data === undefined ? (
          memory.isPending ? (
            <Loading />
          ) : (
            <Failure error={memory.error} retry={() => void memory.refetch()} />
          )
        ) : (
          <>
            <p className="quiet">
              {t("agents.memory.version", { version: memory.data.version, tokens: memory.data.token_count })}
              {memory.data.last_update !== null && `, ${full(memory.data.last_update)}`}
            </p>
            {Object.entries(memory.data.files).map(([name, text]) => (
              <div key={name}>
                <h3 className="mono">{name}</h3>
                <pre className="text-file" tabIndex={0}>
                  {text.trim() || t("agents.memory.empty")}
                </pre>
              </div>
            ))}
          </>
        )}
      </section>
      <Deep slug={slug} />
      <SameElsewhere
        commands={commands({
          trellis: ["memory", "read", slug, "--wide"],
          address: `/memory/${slug}/read?mode=wide`,
          python: `print(client.memory.read(${pythonLiteral(slug)}, mode="wide"))`,
        })}
      />
    </>
  );
}

/** Layer 2, one part at a time: it may be long. */
function Deep({ slug }: { slug: string }) {
  const t = useTexts();
  const [part, choose] = useState<(typeof DEEP)[number] | null>(null);
  const pages = useInfiniteQuery({
    queryKey: ["memory", slug, "deep", part],
    queryFn: ({ pageParam, signal }) =>
      api.get("/memory/{agent_id}/deep", { path: { agent_id: slug }, query: { part: part ?? "decisions", limit: DEEP_PAGE, cursor: pageParam }, signal }),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor,
    enabled: part !== null,
  });
  const items = (pages.data?.pages ?? []).flatMap((page) => page.items);
  return (
    <section className="card">
      <h2>{t("agents.memory.two")}</h2>
      <div className="tabs" role="group" aria-label={t("agents.memory.two")}>
        {DEEP.map((name) => (
          <button key={name} type="button" className="small" aria-pressed={name === part} onClick={() => choose(name)}>
            {t(`agents.deep.${name}`)}
          </button>
        ))}
      </div>
      {part !== null && pages.isPending && <Loading />}
      {pages.error !== null && <Failure error={pages.error} retry={() => void pages.refetch()} />}
      {pages.data !== undefined && items.length === 0 && <p className="quiet">{t("agents.memory.two.none")}</p>}
      {items.map((one) => (
        <div key={one.name}>
          <h3 className="mono spaced">{one.name}</h3>
          <pre className="text-file" tabIndex={0}>
            {one.text.trim()}
          </pre>
        </div>
      ))}
      {pages.hasNextPage && (
        <button type="button" disabled={pages.isFetchingNextPage} onClick={() => void pages.fetchNextPage()}>
          {t("common.more")}
        </button>
      )}
    </section>
  );
}

export function History({ slug }: { slug: string }) {
  const t = useTexts();
  const [shown, show] = useState<number | null>(null);
  const pages = useInfiniteQuery({
    queryKey: ["memory", slug, "history"],
    queryFn: ({ pageParam, signal }) =>
      api.get("/memory/{agent_id}/history", { path: { agent_id: slug }, query: { limit: HISTORY_PAGE, cursor: pageParam }, signal }),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor,
  });
  if (pages.data === undefined) {
    return pages.isPending ? <Loading /> : <Failure error={pages.error} retry={() => void pages.refetch()} />;
  }
  const items = pages.data.pages.flatMap((page) => page.items);
  return (
    <>
      <section className="card">
        <h2>{t("agents.history")}</h2>
        {items.length === 0 && !pages.hasNextPage && <p className="quiet">{t("agents.history.none")}</p>}
        {items.map((one) => (
          <Change key={one.commit} slug={slug} change={one} isShown={one.version !== null && one.version === shown} show={show} />
        ))}
        {pages.hasNextPage && (
          <button type="button" disabled={pages.isFetchingNextPage} onClick={() => void pages.fetchNextPage()}>
            {t("common.more")}
          </button>
        )}
      </section>
      <SameElsewhere
        commands={commands(
          shown === null
            ? {
                trellis: ["memory", "history", slug],
                address: `/memory/${slug}/history`,
                python: `print(client.memory.history(${pythonLiteral(slug)}))`,
              }
            : {
                trellis: ["memory", "diff", slug, String(shown - 1), String(shown)],
                address: `/memory/${slug}/diff?from_version=${shown - 1}&to_version=${shown}`,
                python: `print(client.memory.diff(${pythonLiteral(slug)}, ${shown - 1}, ${shown}).diff)`,
              },
        )}
      />
    </>
  );
}

/** One commit of the memory: who, why, which files, and the difference on request. */
function Change({ slug, change, isShown, show }: { slug: string; change: MemoryChange; isShown: boolean; show: (version: number | null) => void }) {
  const t = useTexts();
  const { full } = useTimes();
  return (
    <div className="change">
      <div className="row">
        <strong>
          {t("agents.history.version")} {change.version ?? "–"}
        </strong>
        <span className="quiet">{full(change.at)}</span>
        <span>{change.author}</span>
        <span className="mono">
          {/^prop_/.test(change.proposal_id ?? "") ? (
            <Link to="/console/proposals" search={{ status: "all", id: change.proposal_id ?? "" }}>
              {change.proposal_id}
            </Link>
          ) : (
            change.proposal_id
          )}
        </span>
        <span className="mono">
          {/^run_/.test(change.run_id ?? "") ? (
            <Link to="/console/runs/$runId" params={{ runId: change.run_id ?? "" }}>
              {change.run_id}
            </Link>
          ) : (
            change.run_id
          )}
        </span>
        <span className="grow" />
        {change.version !== null && (
          <button type="button" className="small" aria-expanded={isShown} onClick={() => show(isShown ? null : change.version)}>
            {t("agents.history.show")}
          </button>
        )}
      </div>
      <p>
        {change.reason}
        {change.files.map((one) => (
          <span key={one.file} className="file-count mono">
            {one.file} <span className="plus">+{one.added}</span> <span className="minus">−{one.removed}</span>
          </span>
        ))}
      </p>
      {isShown && change.version !== null && <Changed slug={slug} version={change.version} />}
    </div>
  );
}

function Changed({ slug, version }: { slug: string; version: number }) {
  const t = useTexts();
  const diff = useQuery({
    queryKey: ["memory", slug, "diff", version],
    queryFn: ({ signal }) =>
      api.get("/memory/{agent_id}/diff", { path: { agent_id: slug }, query: { from_version: version - 1, to_version: version }, signal }),
    staleTime: Number.POSITIVE_INFINITY,
  });
  if (diff.data === undefined) {
    return diff.isPending ? <Loading /> : <Failure error={diff.error} retry={() => void diff.refetch()} />;
  }
  return diff.data.diff === "" ? <p className="quiet">{t("agents.history.equal")}</p> : <Diff unified={diff.data.diff} />;
}
