/** Small parts that every screen uses. */

import { Link } from "@tanstack/react-router";
import { GatewayUnreachable, ProblemError } from "@trellis/client";
import { useEffect, useId, useLayoutEffect, useRef, useState, type KeyboardEvent as ReactKeyboardEvent, type ReactNode } from "react";
import { typed, type Commands } from "../lib/commands";
import { session } from "../session";
import { Store, useStore } from "../store";
import { useTexts } from "../texts";
import { useStatusText } from "../texts-statuses";

const GOOD = new Set(["completed", "succeeded", "applied", "approved", "auto_approved", "COMPLETE", "SUCCEEDED", "DONE", "met", "alive", "active"]);
const BAD = new Set(["failed", "rejected", "dead_lettered", "DEAD", "FAILED", "DENIED", "TIMEOUT", "ERROR", "missed", "silent", "malformed", "error"]);
const WARN = new Set(["pending", "expired", "cancelled", "CANCELLED", "RETRY_BACKOFF", "drained", "paused"]);

export function Status({ value }: { value: string }) {
  const kind = GOOD.has(value) ? "good" : BAD.has(value) ? "bad" : WARN.has(value) ? "warn" : "info";
  const { text, title } = useStatusText()(value);
  return (
    <span className={`badge ${kind}`} title={title}>
      {text}
    </span>
  );
}

export function Loading() {
  const t = useTexts();
  return (
    <p className="loading" role="status">
      {t("common.loading")}…
    </p>
  );
}

export function Empty({ title, hint, command }: { title: string; hint?: string; command?: string }) {
  return (
    <div className="empty">
      <h2>{title}</h2>
      {hint !== undefined && <p>{hint}</p>}
      {command !== undefined && <Command text={typed(command)} />}
    </div>
  );
}

/** What went wrong, in the gateway's words, and a way out. */
export function Failure({ error, retry, list }: { error: unknown; retry?: () => void; list?: "/console/runs" | "/console/jobs" }) {
  const t = useTexts();
  const who = useStore(session);
  const problem = error instanceof ProblemError ? error : null;
  const detail = problem?.detail ?? (error instanceof Error ? error.message : String(error));
  return (
    <div className="banner bad" role="alert">
      <strong>{t("error.title")}</strong>
      <p>{detail}</p>
      {problem?.status === 403 && (
        <>
          <p>{t("error.forbidden", { roles: who?.roles.join(", ") ?? "" })}</p>
          <Command text="trellis token issue --role owner,control-plane" />
          {typeof problem.document["rule"] === "string" && (
            <p>
              <Link to="/console/authority" search={{ rule: problem.document["rule"] }}>
                {t("error.why")}
              </Link>
            </p>
          )}
        </>
      )}
      {error instanceof GatewayUnreachable && <Command text="trellis up" />}
      <div className="row">
        {list !== undefined && problem?.status === 404 && (
          <Link className="button" to={list}>
            {t("error.list")}
          </Link>
        )}
        {retry !== undefined && (
          <button type="button" onClick={retry}>
            {t("error.retry")}
          </button>
        )}
        {problem?.correlationId != null && (
          <span className="quiet">
            {t("error.correlation", { id: "" })}
            <code>{problem.correlationId}</code>
          </span>
        )}
      </div>
    </div>
  );
}

export function Command({ text }: { text: string }) {
  const t = useTexts();
  const shown = useRef<HTMLPreElement>(null);
  const copy = async () => {
    try {
      // Browsers have no clipboard on plain HTTP from another machine, and may refuse it: then a person copies.
      await navigator.clipboard.writeText(text);
      toast(t("common.copied"));
    } catch {
      if (shown.current !== null) getSelection()?.selectAllChildren(shown.current);
      toast(t("common.selected"));
    }
  };
  return (
    <div className="command">
      <pre ref={shown}>{text}</pre>
      <button type="button" className="small" onClick={() => void copy()}>
        {t("common.copy")}
      </button>
    </div>
  );
}

/** The same act on the command line, as curl, and in Python. */
export function SameElsewhere({ commands }: { commands: Commands }) {
  const t = useTexts();
  const [chosen, choose] = useState<keyof Commands>("trellis");
  const names: Record<keyof Commands, string> = { trellis: "trellis", curl: "curl", python: "Python" };
  return (
    <details className="card">
      <summary>{t("common.same")}</summary>
      <div className="tabs" role="group" aria-label={t("common.same")}>
        {(Object.keys(names) as (keyof Commands)[]).filter((name) => commands[name] !== null).map((name) => (
          <button key={name} type="button" className="small" aria-pressed={name === chosen} onClick={() => choose(name)}>
            {names[name]}
          </button>
        ))}
      </div>
      <Command text={commands[chosen] ?? commands.trellis} />
    </details>
  );
}

/**
 * A modal dialog of the browser: it keeps the focus inside, and Escape closes it. The focus begins at the element with
 * `data-focus`. React's `autoFocus` comes too early: the dialog is not shown yet.
 */
export function Dialog({ title, onClose, children }: { title: string; onClose: () => void; children: ReactNode }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const layer = useLayer();
  const heading = useId();
  useLayoutEffect(() => {
    const shown = dialog.current;
    shown?.showModal();
    shown?.querySelector<HTMLElement>("[data-focus=true]")?.focus();
    return () => shown?.close(); // before it is removed: so the focus goes back to where it was
  }, []);
  const pressed = (event: ReactKeyboardEvent) => {
    event.stopPropagation();
    if (event.key !== "Escape" || event.defaultPrevented || event.nativeEvent.isComposing) return;
    // The browser would hide the dialog now and say so later. A key that is pressed in between would find it still open.
    event.preventDefault();
    onClose();
  };
  return (
    <dialog ref={dialog} aria-labelledby={heading} onClose={onClose} onKeyDown={pressed}>
      <h2 id={heading}>{title}</h2>
      {children}
      <Toasts layer={layer} />
    </dialog>
  );
}

export function Json({ value, title }: { value: unknown; title: string }) {
  return (
    <details>
      <summary>{title}</summary>
      <pre className="json">{JSON.stringify(value, null, 2)}</pre>
    </details>
  );
}

export const toasts = new Store<{ id: number; text: string }[]>([]);
const shownKeys = new Set<string>();
let toastId = 0;
const TOAST_MS = 5_000;
const KEYS_MAX = 1_000;

/** A message for a few seconds. One with a key is shown once, however many parts of the console learn of it. */
export function toast(text: string, key?: string): void {
  if (key !== undefined) {
    if (shownKeys.has(key)) return;
    if (shownKeys.size >= KEYS_MAX) shownKeys.clear();
    shownKeys.add(key);
  }
  const id = (toastId += 1);
  toasts.set([...toasts.value.slice(-3), { id, text }]);
  setTimeout(() => toasts.set(toasts.value.filter((one) => one.id !== id)), TOAST_MS);
}

/** Take all messages away, as if none had been shown. */
export function clearToasts(): void {
  toasts.set([]);
  shownKeys.clear();
}

/** The modal dialogs that are open, the topmost last. */
const layers = new Store<readonly string[]>([]);

/** The name of a modal dialog, for the messages inside of it. */
export function useLayer(): string {
  const layer = useId();
  useEffect(() => {
    layers.set([...layers.value, layer]);
    return () => layers.set(layers.value.filter((one) => one !== layer));
  }, [layer]);
  return layer;
}

/**
 * The messages, in the topmost dialog or else in the page: a modal dialog covers everything outside of it, and readers of
 * screens do not see that either.
 */
export function Toasts({ layer }: { layer?: string }) {
  const shown = useStore(toasts);
  if (useStore(layers).at(-1) !== layer) return null;
  return (
    <div className="toasts" role="status" aria-live="polite">
      {shown.map((one) => (
        <div key={one.id} className="toast">
          {one.text}
        </div>
      ))}
    </div>
  );
}

/** Calls the handler for a key that is typed outside of fields and dialogs. */
export function useKeys(handlers: Record<string, () => void>): void {
  const latest = useRef(handlers);
  latest.current = handlers;
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      const target = event.target;
      if (target instanceof Element && target.closest("input, textarea, select, dialog") !== null) return;
      const handler = latest.current[event.key];
      if (handler === undefined) return;
      event.preventDefault();
      handler();
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  }, []);
}
