/** The log of a run or a job: what is recorded about it, in the order of time, with a download as plain text. */

import { useQuery } from "@tanstack/react-query";
import { api } from "../api";
import { useTimes } from "../format";
import { logOf, plainText, type LoggedEvent, type LoggedStep } from "../lib/log";
import { useTexts } from "../texts";

const LINES_SHOWN = 2_000;

/** The last log lines of a job while they are kept; none for a role that may not read jobs. */
export function useSignals(jobId: string, version: number | undefined) {
  const found = useQuery({
    queryKey: ["job", jobId, "signals", version],
    queryFn: ({ signal }) => api.get("/jobs/{job_id}/signals", { path: { job_id: jobId }, signal }),
    enabled: version !== undefined,
    placeholderData: (before) => before,
    retry: false,
  });
  return found.data?.items ?? [];
}

export function Log({ id, version, events, steps }: { id: string; version: number | undefined; events: readonly LoggedEvent[]; steps: readonly LoggedStep[] }) {
  const t = useTexts();
  const { clock } = useTimes();
  const lines = logOf(events, steps, useSignals(id, version));
  const shown = lines.slice(-LINES_SHOWN);
  const download = () => {
    const address = URL.createObjectURL(new Blob([plainText(lines)], { type: "text/plain" }));
    const link = document.createElement("a");
    link.href = address;
    link.download = `${id}.log.txt`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 0);
  };
  return (
    <section className="card">
      <div className="row">
        <h2>{t("log.title")}</h2>
        <span className="grow" />
        <button type="button" className="small" onClick={download}>
          {t("log.download")}
        </button>
      </div>
      <p className="quiet">{t("log.hint")}</p>
      {lines.length > shown.length && <p className="quiet">{t("common.newest", { n: shown.length })}</p>}
      <pre className="json log" tabIndex={0} aria-label={t("log.title")}>
        {shown.map((line) => `${clock(line.ts)}  ${line.source.padEnd(5)} ${line.text}\n`).join("")}
      </pre>
    </section>
  );
}
