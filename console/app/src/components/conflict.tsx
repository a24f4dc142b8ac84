/** What happened to the target of a proposal since it was made: the text it was made for against the text of now. */

import { useQuery } from "@tanstack/react-query";
import { api, type Proposal, type StepFile } from "../api";
import { unifiedDiff } from "../lib/compare";
import { seenText } from "../lib/proposals";
import { useTexts } from "../texts";
import { Diff } from "./diff";
import { Failure, Loading } from "./parts";

export function ChangedSince({ proposal, steps }: { proposal: Proposal; steps: StepFile[] }) {
  const t = useTexts();
  const version = proposal.content["expected_version"];
  return (
    <section className="card">
      <h2>{t("proposals.since")}</h2>
      {typeof version === "number" ? <MemorySince slug={proposal.agent_slug} version={version} /> : <FileSince proposal={proposal} steps={steps} />}
    </section>
  );
}

function MemorySince({ slug, version }: { slug: string; version: number }) {
  const t = useTexts();
  const diff = useQuery({
    queryKey: ["memory", slug, "since", version],
    queryFn: ({ signal }) => api.get("/memory/{agent_id}/diff", { path: { agent_id: slug }, query: { from_version: version }, signal }),
  });
  if (diff.data === undefined) return diff.isPending ? <Loading /> : <Failure error={diff.error} retry={() => void diff.refetch()} />;
  return diff.data.diff === "" ? <p className="quiet">{t("agents.history.equal")}</p> : <Diff unified={diff.data.diff} />;
}

function FileSince({ proposal, steps }: { proposal: Proposal; steps: StepFile[] }) {
  const t = useTexts();
  const seen = seenText(proposal, steps);
  const sources = useQuery({
    queryKey: ["agents", "sources", proposal.agent_slug],
    queryFn: ({ signal }) => api.get("/agents/{slug}/sources", { path: { slug: proposal.agent_slug }, signal }),
    enabled: seen !== null,
  });
  if (seen === null) return <p className="quiet">{t(proposal.target_hash === null ? "proposals.since.new" : "proposals.since.unknown", { target: proposal.target })}</p>;
  if (sources.data === undefined) return sources.isPending ? <Loading /> : <Failure error={sources.error} retry={() => void sources.refetch()} />;
  const now = sources.data.items.find((one) => one.ref === proposal.target)?.text;
  if (now === undefined) return <p>{t("proposals.since.gone", { target: proposal.target })}</p>;
  const diff = unifiedDiff(seen, now);
  return diff === null ? <p className="quiet">{t("artifacts.compared.equal")}</p> : <Diff unified={diff} />;
}
