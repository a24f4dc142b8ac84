/** Citations, each compared word for word with its source, and the way to the passage. */

import { useEffect, useRef, useState } from "react";
import { locate, stateOf, type Citation } from "../lib/citations";
import { writtenOut } from "../lib/unseen";
import { useTexts } from "../texts";
import { Dialog } from "./parts";

const BADGES = { verified: "good", unverified: "bad", unchecked: "" } as const;

export function Citations({ items, sources }: { items: Citation[]; sources: ReadonlyMap<string, string> }) {
  const t = useTexts();
  const [shown, show] = useState<{ citation: Citation; text: string } | null>(null);
  return (
    <>
      {items.length === 0 && <p className="quiet">{t("proposals.citations.none")}</p>}
      {items.map((one, at) => {
        const state = stateOf(one, sources);
        const text = sources.get(one.ref);
        return (
          <figure key={at} className={`quote ${state}`}>
            <blockquote>{writtenOut(one.excerpt)}</blockquote>
            <figcaption className="row">
              <code>{one.ref}</code>
              <span className={`badge ${BADGES[state]}`}>{t(`proposals.citation.${state}`)}</span>
              {text !== undefined && (
                <button type="button" className="small" onClick={() => show({ citation: one, text })}>
                  {t("proposals.citation.show")}
                </button>
              )}
            </figcaption>
          </figure>
        );
      })}
      {shown !== null && <SourceDialog {...shown} onClose={() => show(null)} />}
    </>
  );
}

/** Quotations that the platform could not confirm when the proposal was made. */
export function DoubtfulQuotations({ items, title }: { items: Citation[]; title: string }) {
  if (items.length === 0) return null;
  return (
    <>
      <p className="banner bad">{title}</p>
      {items.map((one, at) => (
        <figure key={at} className="quote unverified">
          <blockquote>{writtenOut(one.excerpt)}</blockquote>
          <figcaption>
            <code>{writtenOut(one.ref)}</code>
          </figcaption>
        </figure>
      ))}
    </>
  );
}

/** A source, scrolled to the passage that a citation names. */
export function SourceDialog({ citation, text, onClose }: { citation: Citation; text: string; onClose: () => void }) {
  const t = useTexts();
  const place = locate(text, citation);
  const mark = useRef<HTMLElement>(null);
  useEffect(() => {
    // Braces: newer browsers return a promise here, which React would take for the function that ends the effect.
    mark.current?.scrollIntoView({ block: "center" });
  }, []);
  return (
    <Dialog title={citation.ref} onClose={onClose}>
      {place === null && <p className="quiet">{t("proposals.citation.unverified")}</p>}
      <div className="source-text" tabIndex={0} role="group" aria-label={citation.ref}>
        {place === null ? (
          text
        ) : (
          <>
            {place.before}
            <mark ref={mark}>{place.found}</mark>
            {place.after}
          </>
        )}
      </div>
      <div className="row end">
        <button type="button" onClick={onClose}>
          {t("common.close")}
        </button>
      </div>
    </Dialog>
  );
}
