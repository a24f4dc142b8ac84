/** Artifacts: what queue jobs left behind. The list with its filter, one artifact as its type wants it, and two compared. */

import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { Link, useNavigate, useParams, useSearch } from "@tanstack/react-router";
import { useCallback, useId, useMemo, useState } from "react";
import { api, type Artifact, type ArtifactListed } from "../api";
import { Citations, SourceDialog } from "../components/citations";
import { Diff } from "../components/diff";
import { FilterBox } from "../components/filter-box";
import { Empty, Failure, Json, Loading, SameElsewhere } from "../components/parts";
import { PagedTable, type Column } from "../components/table";
import { between, useTimes } from "../format";
import { ARTIFACT_TYPES, asText, contentOf, epochOf, readable, titleOf } from "../lib/artifacts";
import type { Brief, PreprocessedProposal, ResearchBrief, Section } from "../lib/artifacts";
import { locate, stateOf, type Citation } from "../lib/citations";
import { commands, pythonLiteral } from "../lib/commands";
import { unifiedDiff } from "../lib/compare";
import { parseFilter, passes, valueOf, type FilterFields } from "../lib/filter";
import { rowsBy } from "../lib/pages";
import { useAgents, useSomeAgent } from "../live";
import { useTexts } from "../texts";

const PAGE = 100;
/** What is final never changes. */
const FOREVER = { staleTime: Number.POSITIVE_INFINITY };
const SEVERITY = { info: "info", warning: "warn", error: "bad" } as const;

export function Artifacts() {
  const t = useTexts();
  const { ago } = useTimes();
  const navigate = useNavigate();
  const { q = "" } = useSearch({ from: "/console/artifacts" });
  const agents = useAgents();
  const someAgent = useSomeAgent();
  const fields: FilterFields = {
    type: { values: ARTIFACT_TYPES },
    agent: { values: (agents.data?.items ?? []).flatMap((one) => (one.slug == null ? [] : [one.slug])) },
    run: {},
    job: {},
    tag: {},
    age: { duration: true },
  };
  const filter = parseFilter(q, fields);
  const type = ARTIFACT_TYPES.find((one) => one === valueOf(filter, "type"));
  const job = valueOf(filter, "job");
  const asked = { ...(type ? { type } : {}), ...(job ? { job_id: job } : {}) };
  const queryKey = ["artifacts", asked];
  const listing = useInfiniteQuery({
    queryKey,
    meta: rowsBy("artifact_id", false),
    queryFn: ({ pageParam, signal }) => api.get("/artifacts", { query: { limit: PAGE, cursor: pageParam, ...asked }, signal }),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor,
  });
  const rows = useMemo(
    () => (listing.data?.pages ?? []).flatMap((page) => page.items).filter((one) => passes(filter, valuesOf(one))),
    // eslint-disable-next-line react-hooks/exhaustive-deps
    [listing.data, q],
  );
  const columns: Column<ArtifactListed>[] = [
    { title: t("artifacts.id"), width: "minmax(14rem, 2fr)", cell: (one) => one.artifact_id },
    { title: t("artifacts.type"), width: "minmax(11rem, 1.2fr)", cell: (one) => <span className="badge info">{one.type.replaceAll("_", " ")}</span> },
    { title: t("artifacts.agent"), width: "minmax(8rem, 1.2fr)", cell: (one) => one.agent_slug },
    { title: t("artifacts.entities"), width: "minmax(7rem, 1fr)", cell: (one) => one.entity_refs.join(", ") },
    { title: t("artifacts.tags"), width: "minmax(6rem, 1fr)", cell: (one) => one.tags.join(", ") },
    { title: t("artifacts.finalized"), width: "7rem", cell: (one) => ago(one.finalized_at ?? one.created_at) },
  ];
  const search = useCallback(
    (text: string) => void navigate({ to: "/console/artifacts", search: text === "" ? {} : { q: text }, replace: true }),
    [navigate],
  );
  return (
    <>
      <div className="page-head">
        <h1>{t("artifacts.title")}</h1>
        <FilterBox value={q} onChange={search} fields={fields} filter={filter} example={`type:BRIEF agent:${someAgent} tag:draft`} />
      </div>
      <PagedTable
        listing={listing}
        queryKey={queryKey}
        label={t("artifacts.title")}
        rows={rows}
        columns={columns}
        keyOf={(one) => one.artifact_id}
        linkOf={(one) => ({ to: "/console/artifacts/$artifactId", params: { artifactId: one.artifact_id } })}
        empty={
          q === "" ? (
            <Empty
              title={t("artifacts.empty")}
              hint={t("artifacts.empty.hint")}
              command={`trellis submit RESEARCH '{"query": "What is written about it?"}' --agent ${someAgent}`}
            />
          ) : (
            <Empty title={t("artifacts.empty.filter")} />
          )
        }
      />
      <SameElsewhere
        commands={commands({
          trellis: ["artifacts", "list", ...(type ? ["--type", type] : []), ...(job ? ["--job", job] : [])],
          address: `/artifacts?${new URLSearchParams({ ...asked, limit: String(PAGE) })}`,
          python: `print(client.artifacts.list(${[type && `type_=${pythonLiteral(type)}`, job && `job_id=${pythonLiteral(job)}`].filter(Boolean).join(", ")}))`,
        })}
      />
    </>
  );
}

function valuesOf(one: ArtifactListed) {
  return {
    id: one.artifact_id,
    type: one.type,
    agent: one.agent_slug,
    run: one.run_id,
    job: one.job_id,
    tag: one.tags.join(" "),
    entities: one.entity_refs.join(" "),
    age: between(one.finalized_at ?? one.created_at, Date.now()),
  };
}

function useArtifact(id: string | undefined) {
  return useQuery({
    queryKey: ["artifact", id],
    queryFn: ({ signal }) => api.get("/artifacts/{artifact_id}", { path: { artifact_id: id ?? "" }, signal }),
    enabled: id !== undefined,
    ...FOREVER,
  });
}

export function ArtifactPage() {
  const { artifactId } = useParams({ from: "/console/artifacts/$artifactId" });
  const { with: other } = useSearch({ from: "/console/artifacts/$artifactId" });
  const one = useArtifact(artifactId);
  if (one.data === undefined) {
    return one.isPending ? <Loading /> : <Failure error={one.error} retry={() => void one.refetch()} />;
  }
  const artifact = one.data;
  return (
    <article aria-label={titleOf(artifact)}>
      <div className="page-head">
        <h1>{titleOf(artifact)}</h1>
        <span className="badge info">{artifact.type.replaceAll("_", " ")}</span>
        <Lock artifact={artifact} />
        <span className="grow" />
        <CompareWith artifact={artifact} {...(other === undefined ? {} : { other })} />
      </div>
      {other !== undefined ? <Comparison artifact={artifact} otherId={other} /> : <Reading artifact={artifact} />}
      <SameElsewhere
        commands={commands({
          trellis: ["artifacts", "show", artifactId],
          address: `/artifacts/${artifactId}`,
          python: `print(client.artifacts.get(${pythonLiteral(artifactId)}))`,
        })}
      />
    </article>
  );
}

function Lock({ artifact }: { artifact: Artifact }) {
  const t = useTexts();
  const { full } = useTimes();
  if (!artifact.finalized) return <span className="badge warn">{t("artifacts.open")}</span>;
  return (
    <span className="badge good" title={t("artifacts.final.hint")}>
      <svg className="lock" viewBox="0 0 12 14" width="10" height="12" aria-hidden="true">
        <path d="M3 6V4a3 3 0 0 1 6 0v2h1a1 1 0 0 1 1 1v5a1 1 0 0 1-1 1H2a1 1 0 0 1-1-1V7a1 1 0 0 1 1-1zm1.4 0h3.2V4a1.6 1.6 0 0 0-3.2 0z" />
      </svg>{" "}
      {t("artifacts.final", { time: artifact.finalized_at === null ? "" : full(artifact.finalized_at) })}
    </span>
  );
}

/** The artifact as a person reads it, with its citations compared with what its job has read. */
function Reading({ artifact }: { artifact: Artifact }) {
  const t = useTexts();
  const { full } = useTimes();
  const sources = useSources(artifact.job_id);
  const states = artifact.sources.map((one) => stateOf(one, sources.texts));
  const verified = states.filter((one) => one === "verified").length;
  return (
    <div className="reading">
      <div>
        <Rendered artifact={artifact} sources={sources.texts} />
        <section className="card">
          <h2>{t("proposals.citations")}</h2>
          {artifact.sources.length > 0 && (
            <p>
              <span className={`badge ${verified === states.length ? "good" : "warn"}`}>{t("artifacts.verified", { n: verified, of: states.length })}</span>{" "}
              <span className="quiet">{t("artifacts.verified.hint")}</span>
            </p>
          )}
          {sources.error !== null && <Failure error={sources.error} />}
          <Citations items={artifact.sources} sources={sources.texts} />
        </section>
      </div>
      <section className="card">
        <h2>{t("proposals.origin")}</h2>
        <dl className="facts stacked">
          <dt>{t("artifacts.id")}</dt>
          <dd className="mono">{artifact.artifact_id}</dd>
          <dt>{t("artifacts.agent")}</dt>
          <dd>
            <Link to="/console/agents/$slug" params={{ slug: artifact.agent_slug }}>
              {artifact.agent_slug}
            </Link>
          </dd>
          <dt>{t("artifacts.job")}</dt>
          <dd className="mono">
            <Link to="/console/jobs/$jobId" params={{ jobId: artifact.job_id }}>
              {artifact.job_id}
            </Link>
          </dd>
          <dt>{t("artifacts.run")}</dt>
          <dd className="mono">
            {artifact.run_id}{" "}
            <Link to="/console/artifacts" search={{ q: `run:${artifact.run_id}` }}>
              {t("artifacts.of.run")}
            </Link>
          </dd>
          <dt>{t("artifacts.created")}</dt>
          <dd>{full(artifact.created_at)}</dd>
          <dt>{t("artifacts.tags")}</dt>
          <dd>{artifact.tags.join(", ") || "–"}</dd>
          {sources.sha256 !== null && (
            <>
              <dt>SHA-256</dt>
              <dd className="mono">{sources.sha256}</dd>
            </>
          )}
        </dl>
        <Json value={artifact} title={t("common.raw")} />
      </section>
    </div>
  );
}

/** The texts that the job of an artifact was answered from, as they were then. Roles that may not read them get none. */
function useSources(jobId: string): { texts: ReadonlyMap<string, string>; sha256: string | null; error: unknown } {
  const job = useQuery({
    queryKey: ["job", jobId],
    queryFn: ({ signal }) => api.get("/jobs/{job_id}", { path: { job_id: jobId }, signal }),
    retry: false,
  });
  const asked = job.data !== undefined && "context" in job.data ? job.data.context : undefined;
  const epoch = epochOf((asked as { memory_snapshot_url?: string | null } | undefined)?.memory_snapshot_url);
  const context = useQuery({
    queryKey: ["job-context", jobId, epoch],
    queryFn: ({ signal }) => api.get("/jobs/{job_id}/context/{epoch}", { path: { job_id: jobId, epoch: epoch ?? 0 }, signal }),
    enabled: epoch !== null,
    retry: false,
    ...FOREVER,
  });
  const texts = useMemo(() => {
    const files = [...(context.data?.sources ?? []), ...(context.data?.memory?.files ?? [])];
    return new Map(files.map((one) => [one.ref, one.text]));
  }, [context.data]);
  const result: unknown = job.data?.result;
  const digest = typeof result === "object" && result !== null && "sha256" in result ? String(result.sha256) : null;
  return { texts, sha256: digest, error: context.error };
}

function Rendered({ artifact, sources }: { artifact: Artifact; sources: ReadonlyMap<string, string> }) {
  const t = useTexts();
  const known = contentOf(artifact);
  switch (known?.type) {
    case "RESEARCH_BRIEF":
      return <ResearchBriefView brief={known.content} citations={artifact.sources} sources={sources} />;
    case "BRIEF":
      return <BriefView brief={known.content} />;
    case "PREPROCESSED_PROPOSAL":
      return <PreprocessedView made={known.content} />;
    case undefined:
      return (
        <section className="card">
          <p className="quiet">{t("artifacts.unknown")}</p>
          <pre className="json">{readable(artifact.content)}</pre>
        </section>
      );
  }
}

function ResearchBriefView({ brief, citations, sources }: { brief: ResearchBrief; citations: Citation[]; sources: ReadonlyMap<string, string> }) {
  const t = useTexts();
  return (
    <section className="card">
      <p className="prose lead">{brief.summary}</p>
      {brief.sections.map((one, at) => (
        <section key={at}>
          <h2 className="spaced">{one.heading}</h2>
          <p className="prose">{one.body}</p>
          <SectionSources section={one} citations={citations} sources={sources} />
        </section>
      ))}
      <Lines title={t("artifacts.conclusions")} items={brief.conclusions} />
      <Lines title={t("artifacts.questions")} items={brief.open_questions} />
    </section>
  );
}

function Lines({ title, items }: { title: string; items: string[] }) {
  if (items.length === 0) return null;
  return (
    <>
      <h2 className="spaced">{title}</h2>
      <ul className="lines">
        {items.map((one, at) => (
          <li key={at}>{one}</li>
        ))}
      </ul>
    </>
  );
}

/** The citations of a section: each opens its source at the passage. */
function SectionSources({ section, citations, sources }: { section: Section; citations: Citation[]; sources: ReadonlyMap<string, string> }) {
  const t = useTexts();
  const [shown, show] = useState<{ citation: Citation; text: string } | null>(null);
  const cited = citations.filter((one) => section.sources.includes(one.ref));
  return (
    <div className="row cites">
      {cited.map((one, at) => {
        const text = sources.get(one.ref);
        const found = text !== undefined && locate(text, one) !== null;
        return (
          <button
            key={at}
            type="button"
            className={`small cite ${text === undefined ? "" : found ? "good" : "bad"}`}
            disabled={text === undefined}
            title={`${t(`proposals.citation.${stateOf(one, sources)}`)}: ${one.excerpt.slice(0, 200)}`}
            onClick={() => text !== undefined && show({ citation: one, text })}
          >
            {text === undefined ? "?" : found ? "✓" : "✗"} {one.ref}
          </button>
        );
      })}
      {shown !== null && <SourceDialog {...shown} onClose={() => show(null)} />}
    </div>
  );
}

function BriefView({ brief }: { brief: Brief }) {
  const t = useTexts();
  const entities = Object.entries(brief.entity_map);
  return (
    <section className="card">
      <p className="prose">{brief.body}</p>
      <p className="quiet">{t("artifacts.words", { n: brief.word_count })}</p>
      {entities.length > 0 && (
        <>
          <h2>{t("artifacts.entities")}</h2>
          <dl className="facts">
            {entities.map(([slug, name]) => (
              <div className="pair" key={slug}>
                <dt className="mono">{slug}</dt>
                <dd>{name}</dd>
              </div>
            ))}
          </dl>
        </>
      )}
    </section>
  );
}

function PreprocessedView({ made }: { made: PreprocessedProposal }) {
  const t = useTexts();
  const diff = unifiedDiff(readable(made.original), readable(made.enriched));
  return (
    <section className="card">
      <h2>{t("artifacts.enriched")}</h2>
      {diff === null ? <p className="quiet">{t("artifacts.enriched.none")}</p> : <Diff unified={diff} />}
      <h2 className="spaced">{t("artifacts.issues")}</h2>
      {made.issues.length === 0 && <p className="quiet">{t("artifacts.issues.none")}</p>}
      {made.issues.map((one, at) => (
        <p key={at}>
          <span className={`badge ${SEVERITY[one.severity]}`}>{one.severity}</span> <code>{one.field}</code> {one.message}
        </p>
      ))}
      {made.entity_matches.length > 0 && (
        <>
          <h2>{t("artifacts.matches")}</h2>
          <div className="scroll-x" tabIndex={0} role="group" aria-label={t("artifacts.matches")}>
            <table>
              <tbody>
                {made.entity_matches.map((one, at) => (
                  <tr key={at}>
                    <td>{one.text}</td>
                    <td className="mono">{one.entity_id}</td>
                    <td className="num">
                      <meter min={0} max={1} value={one.confidence} aria-label={one.text} /> {Math.round(one.confidence * 100)} %
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </>
      )}
    </section>
  );
}

/** Chooses the artifact to compare with: the newest of the same type. */
function CompareWith({ artifact, other }: { artifact: Artifact; other?: string }) {
  const t = useTexts();
  const navigate = useNavigate();
  const field = useId();
  const type = ARTIFACT_TYPES.find((one) => one === artifact.type);
  const listing = useQuery({
    queryKey: ["artifacts", "same-type", type],
    queryFn: ({ signal }) => api.get("/artifacts", { query: { limit: PAGE, ...(type ? { type } : {}) }, signal }),
    staleTime: 30_000,
  });
  const offers = (listing.data?.items ?? []).filter((one) => one.artifact_id !== artifact.artifact_id).map((one) => one.artifact_id);
  if (other !== undefined && !offers.includes(other)) offers.unshift(other);
  if (offers.length === 0) return null;
  const go = (id: string) =>
    void navigate({ to: "/console/artifacts/$artifactId", params: { artifactId: artifact.artifact_id }, search: id === "" ? {} : { with: id } });
  return (
    <span className="row">
      <label className="inline" htmlFor={field}>
        {t("artifacts.compare")}
      </label>
      <select id={field} className="fit" value={other ?? ""} onChange={(event) => go(event.target.value)}>
        <option value="">{t("artifacts.compare.none")}</option>
        {offers.map((id) => (
          <option key={id}>{id}</option>
        ))}
      </select>
    </span>
  );
}

function Comparison({ artifact, otherId }: { artifact: Artifact; otherId: string }) {
  const t = useTexts();
  const other = useArtifact(otherId);
  if (other.data === undefined) {
    return other.isPending ? <Loading /> : <Failure error={other.error} retry={() => void other.refetch()} />;
  }
  const diff = unifiedDiff(asText(other.data), asText(artifact));
  return (
    <section className="card">
      <h2>{t("artifacts.compared")}</h2>
      <p className="mono">
        <Link to="/console/artifacts/$artifactId" params={{ artifactId: otherId }}>
          {otherId}
        </Link>{" "}
        →{" "}
        <Link to="/console/artifacts/$artifactId" params={{ artifactId: artifact.artifact_id }}>
          {artifact.artifact_id}
        </Link>
      </p>
      {diff === null ? <p className="quiet">{t("artifacts.compared.equal")}</p> : <Diff unified={diff} />}
    </section>
  );
}
