/** Asks how to cancel a run or a job: soft or hard. */

import { useMutation } from "@tanstack/react-query";
import { useState } from "react";
import type { Commands } from "../lib/commands";
import { failed } from "../live";
import { useTexts } from "../texts";
import { Dialog, Failure, SameElsewhere } from "./parts";

export type CancelMode = "soft" | "hard";

export function CancelDialog({
  id,
  title,
  action,
  cancel,
  commandsOf,
  onDone,
  onClose,
}: {
  id: string;
  title: string;
  action: string;
  cancel: (mode: CancelMode) => Promise<unknown>;
  commandsOf: (mode: CancelMode) => Commands;
  onDone: () => void;
  onClose: () => void;
}) {
  const t = useTexts();
  const [how, choose] = useState<CancelMode>("soft");
  const sent = useMutation({
    mutationFn: () => cancel(how),
    onSuccess: () => {
      onClose();
      onDone();
    },
    onError: failed,
  });
  return (
    <Dialog title={title} onClose={onClose}>
      <p className="mono">{id}</p>
      <fieldset>
        <legend className="hidden">{action}</legend>
        {(["soft", "hard"] as const).map((one) => (
          <label key={one}>
            <input type="radio" name="mode" checked={one === how} onChange={() => choose(one)} />
            {t(`run.cancel.${one}`)}
          </label>
        ))}
      </fieldset>
      {sent.error !== null && <Failure error={sent.error} />}
      <div className="row end">
        <button type="button" data-focus="true" onClick={onClose}>
          {t("common.cancel")}
        </button>
        <button type="button" className="danger" disabled={sent.isPending} onClick={() => sent.mutate()}>
          {action}
        </button>
      </div>
      <SameElsewhere commands={commandsOf(how)} />
    </Dialog>
  );
}
