/** Asks before an act of an operator: what it does, why it is done, and the same act elsewhere. */

import { useMutation } from "@tanstack/react-query";
import { useId, useState } from "react";
import type { Commands } from "../lib/commands";
import { failed } from "../live";
import { useTexts } from "../texts";
import { Dialog, Failure, SameElsewhere } from "./parts";

const REASON_MAX = 500;

export function ActDialog({
  title,
  subject,
  note,
  action,
  withReason = true,
  act,
  commandsOf,
  onDone,
  onClose,
}: {
  title: string;
  subject: string;
  note: string;
  action: string;
  /** Whether the act takes a reason, for the audit record. */
  withReason?: boolean;
  act: (reason: string | null) => Promise<unknown>;
  commandsOf: (reason: string | null) => Commands;
  onDone: () => void;
  onClose: () => void;
}) {
  const t = useTexts();
  const field = useId();
  const [text, setText] = useState("");
  const reason = text.trim() === "" ? null : text.trim();
  const sent = useMutation({
    mutationFn: () => act(reason),
    onSuccess: () => {
      onClose();
      onDone();
    },
    onError: failed,
  });
  return (
    <Dialog title={title} onClose={onClose}>
      <p className="mono">{subject}</p>
      <p>{note}</p>
      {withReason && (
        <>
          <label htmlFor={field}>{t("common.reason")}</label>
          <input id={field} data-focus="true" value={text} maxLength={REASON_MAX} onChange={(event) => setText(event.target.value)} />
        </>
      )}
      {sent.error !== null && <Failure error={sent.error} />}
      <div className="row end">
        <button type="button" data-focus={!withReason} onClick={onClose}>
          {t("common.cancel")}
        </button>
        <button type="button" className="primary" disabled={sent.isPending} onClick={() => sent.mutate()}>
          {action}
        </button>
      </div>
      <SameElsewhere commands={commandsOf(reason)} />
    </Dialog>
  );
}
