/** Alerts: what needs an operator, since when, what to do first, and the runbook. */

import { useQuery } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { Fragment } from "react";
import { api, type AlertListed } from "../api";
import { Loaded, Scroll } from "../components/operation-parts";
import { Command, Dialog, Empty, SameElsewhere } from "../components/parts";
import { between, duration, useTimes } from "../format";
import { commands } from "../lib/commands";
import { blocksOf, type Block, type Span } from "../lib/markdown";
import { POLL_SLOW_MS } from "../live";
import { useTexts } from "../texts";

const SHOWN_MAX = 200;

export function Alerts() {
  const t = useTexts();
  const navigate = useNavigate();
  const { runbook } = useSearch({ from: "/console/alerts" });
  const alerts = useQuery({
    queryKey: ["alerts", "all"],
    queryFn: ({ signal }) => api.get("/alerts", { query: { limit: SHOWN_MAX }, signal }),
    refetchInterval: POLL_SLOW_MS,
  });
  const { ago } = useTimes();
  const read = (name?: string) => void navigate({ to: "/console/alerts", search: name === undefined ? {} : { runbook: name } });
  return (
    <>
      <div className="page-head">
        <h1>{t("alerts.title")}</h1>
      </div>
      <Loaded query={alerts}>
        {(page) => {
          const open = page.items.filter((one) => one.state === "open");
          const resolved = page.items.filter((one) => one.state === "resolved");
          const seenAt = page.evaluated_at ?? null;
          const unwatched = page.evaluated !== false ? null : seenAt === null ? t("alerts.unwatched") : t("alerts.stale", { time: ago(seenAt) });
          return (
            <>
              {open.length > 0 && unwatched !== null && <p className="banner bad">{unwatched}</p>}
              {open.length === 0 ? (
                <Empty title={unwatched ?? t("alerts.none")} hint={t("alerts.none.hint")} command="trellis up --roles alerts" />
              ) : (
                open.map((one) => <AlertCard key={one.id} alert={one} read={read} />)
              )}
              {page.items.length === SHOWN_MAX && <p className="quiet">{t("common.newest", { n: SHOWN_MAX })}</p>}
              {resolved.length > 0 && (
                <section className="card">
                  <h2>{t("alerts.resolved")}</h2>
                  <Resolved items={resolved} read={read} />
                </section>
              )}
            </>
          );
        }}
      </Loaded>
      {runbook !== undefined && <Runbook name={runbook} onClose={() => read()} />}
      <SameElsewhere commands={commands({ trellis: ["alerts", "list"], address: "/alerts", python: "print(client.system.alerts().items)" })} />
    </>
  );
}

/** The name of a runbook is the last word of the command that prints it. */
export function runbookName(command: string): string {
  return (command.split(/[\s/]+/).at(-1) ?? "").replace(/\.md$/, "");
}

function AlertCard({ alert, read }: { alert: AlertListed; read: (name: string) => void }) {
  const t = useTexts();
  const { ago, full } = useTimes();
  return (
    <section className="card alert" aria-label={alert.name}>
      <div className="row">
        <span className="badge bad">{alert.name}</span>
        {alert.subject !== "" && <code>{alert.subject}</code>}
        <span className="grow" />
        <span className="quiet" title={full(alert.raised_at)}>
          {t("alerts.since", { time: ago(alert.raised_at) })}
        </span>
      </div>
      <p className="alert-text">{alert.text}</p>
      <p>
        <strong>{t("alerts.first")}</strong> {alert.action}
      </p>
      <button type="button" onClick={() => read(runbookName(alert.runbook))}>
        {t("alerts.runbook")}
      </button>
    </section>
  );
}

function Resolved({ items, read }: { items: AlertListed[]; read: (name: string) => void }) {
  const t = useTexts();
  const { ago } = useTimes();
  return (
    <Scroll label={t("alerts.resolved")}>
      <table>
        <tbody>
          {items.map((one) => (
            <tr key={one.id}>
              <td>
                <span className="badge">{one.name}</span>
              </td>
              <td className="mono">{one.subject}</td>
              <td>{one.text}</td>
              <td className="nowrap">{one.resolved_at === null ? "" : ago(one.resolved_at)}</td>
              <td className="nowrap">{one.resolved_at === null ? "" : t("alerts.lasted", { time: duration(between(one.raised_at, one.resolved_at)) })}</td>
              <td>
                <button type="button" className="small" aria-label={`${t("alerts.runbook")} ${one.name}`} onClick={() => read(runbookName(one.runbook))}>
                  {t("alerts.runbook")}
                </button>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

function Runbook({ name, onClose }: { name: string; onClose: () => void }) {
  const t = useTexts();
  const page = useQuery({
    queryKey: ["runbook", name],
    queryFn: ({ signal }) => api.text("/runbooks/{name}", { path: { name }, signal }),
    staleTime: Number.POSITIVE_INFINITY,
  });
  return (
    <Dialog title={`${t("alerts.runbook")}: ${name}`} onClose={onClose}>
      <button type="button" className="close" data-focus="true" onClick={onClose}>
        {t("common.close")}
      </button>
      <Loaded query={page}>
        {(text) => (
          <div className="runbook">
            {blocksOf(text).map((block, at) => (
              <Drawn key={at} block={block} />
            ))}
          </div>
        )}
      </Loaded>
      <SameElsewhere
        commands={commands({
          trellis: ["alerts", "runbook", name],
          isLocal: true,
          address: `/runbooks/${encodeURIComponent(name)}`,
        })}
      />
    </Dialog>
  );
}

function Drawn({ block }: { block: Block }) {
  if (block.kind === "code") return <Command text={block.text} />;
  if (block.kind === "heading") {
    return (
      <h3>
        <Spans spans={block.spans} />
      </h3>
    );
  }
  if (block.kind === "paragraph") {
    return (
      <p>
        <Spans spans={block.spans} />
      </p>
    );
  }
  const List = block.ordered ? "ol" : "ul";
  return (
    <List>
      {block.items.map((spans, at) => (
        <li key={at}>
          <Spans spans={spans} />
        </li>
      ))}
    </List>
  );
}

function Spans({ spans }: { spans: Span[] }) {
  return spans.map((span, at) => (
    <Fragment key={at}>
      {span.kind === "code" ? <code>{span.text}</code> : span.kind === "strong" ? <strong>{span.text}</strong> : span.text}
    </Fragment>
  ));
}
