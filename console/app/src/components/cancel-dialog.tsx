/** Asks how to cancel a run or a job: soft or hard. */

import { api } from "../api";
import { commands, pythonLiteral } from "../lib/commands";
import { queries } from "../live";
import { useTexts } from "../texts";
import { ActDialog } from "./act-dialog";
import { toast } from "./parts";

type CancelMode = "soft" | "hard";
/** The words for each on the command line, in Python and in addresses. */
const CALLED = { run: { command: "runs", place: "runs" }, job: { command: "job", place: "jobs" } } as const;

export function CancelDialog({ what, id, onClose }: { what: "run" | "job"; id: string; onClose: () => void }) {
  const t = useTexts();
  const { command, place } = CALLED[what];
  const cancel = (mode: CancelMode): Promise<unknown> =>
    what === "run"
      ? api.post("/runs/{run_id}/cancel", { path: { run_id: id }, body: { mode } })
      : api.post("/jobs/{job_id}/cancel", { path: { job_id: id }, body: { mode } });
  return (
    <ActDialog<CancelMode>
      title={t(`${what}.cancel.title`)}
      subject={id}
      action={t(`${what}.cancel`)}
      kind="danger"
      withReason={false}
      ways={{ soft: t("run.cancel.soft"), hard: t("run.cancel.hard") }}
      act={({ way }) => cancel(way)}
      commandsOf={({ way }) =>
        commands({
          trellis: [command, "cancel", id, ...(way === "hard" ? ["--hard"] : [])],
          method: "POST",
          address: `/${place}/${id}/cancel`,
          body: { mode: way },
          python: `client.${place}.cancel(${pythonLiteral(id)}, mode=${pythonLiteral(way)})`,
        })
      }
      onDone={() => {
        toast(t(`${what}.cancelled`, { id }));
        void queries.invalidateQueries({ queryKey: [what, id] });
      }}
      onClose={onClose}
    />
  );
}
