/** Asks before an act: what it does, how and why it is done, and the same act elsewhere. */

import { useMutation } from "@tanstack/react-query";
import { useId, useState } from "react";
import type { Commands } from "../lib/commands";
import { failed } from "../live";
import { useTexts } from "../texts";
import { Dialog, Failure, SameElsewhere } from "./parts";

const REASON_MAX = 500;

/** What a person decided in the dialog. */
export interface Decided<Way extends string> {
  way: Way;
  reason: string | null;
}

export function ActDialog<Way extends string = "", Answer = unknown>({
  title,
  subject,
  note,
  action,
  kind = "primary",
  withReason = true,
  ways,
  act,
  commandsOf,
  onDone,
  onSettled,
  onClose,
}: {
  title: string;
  subject: string;
  note?: string;
  action: string;
  kind?: "primary" | "danger";
  /** Whether the act takes a reason, for the audit record. */
  withReason?: boolean;
  /** The ways in which it can be done, the first one chosen at first, with what each means. */
  ways?: Record<Way, string>;
  act: (decided: Decided<Way>) => Promise<Answer>;
  commandsOf: (decided: Decided<Way>) => Commands;
  onDone: (answer: Answer) => void;
  /** After the act and after its refusal: a refusal may mean that what is shown has changed. */
  onSettled?: () => void;
  onClose: () => void;
}) {
  const t = useTexts();
  const field = useId();
  const named = Object.entries(ways ?? {}) as [Way, string][];
  const [way, choose] = useState<Way>(named[0]?.[0] ?? ("" as Way));
  const [text, setText] = useState("");
  const decided = { way, reason: text.trim() === "" ? null : text.trim() };
  const sent = useMutation({
    mutationFn: () => act(decided),
    onSuccess: (answer) => {
      onClose();
      onDone(answer);
    },
    onError: failed,
    onSettled: () => onSettled?.(),
  });
  return (
    <Dialog title={title} onClose={onClose}>
      <p className="mono">{subject}</p>
      {note !== undefined && <p>{note}</p>}
      {named.length > 0 && (
        <fieldset>
          <legend className="hidden">{action}</legend>
          {named.map(([one, meaning]) => (
            <label key={one}>
              <input type="radio" name={field} checked={one === way} onChange={() => choose(one)} />
              {meaning}
            </label>
          ))}
        </fieldset>
      )}
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
        <button type="button" className={kind} disabled={sent.isPending} onClick={() => sent.mutate()}>
          {action}
        </button>
      </div>
      <SameElsewhere commands={commandsOf(decided)} />
    </Dialog>
  );
}
