/** Events: what happened, who did it and why. Looked up by type or correlation id, or followed from now on. */

import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate, useSearch } from "@tanstack/react-router";
import { useEffect, useId, useRef, useState, type FormEvent } from "react";
import { api, type EventListed } from "../api";
import { EventRows } from "../components/events";
import { Loaded, Scroll } from "../components/operation-parts";
import { Empty, Failure, Loading, SameElsewhere } from "../components/parts";
import { useTimes } from "../format";
import { commands, optionsOf, pythonArguments, pythonLiteral } from "../lib/commands";
import { changes, failed, mode, POLL_MS } from "../live";
import { useStore } from "../store";
import { useTexts } from "../texts";

const SHOWN_MAX = 200;
const SINCE_MS: Record<string, number> = { hour: 3_600_000, day: 86_400_000 };

interface Asked {
  type?: string;
  correlation?: string;
  lifecycle?: string;
  since?: string;
}

export function EventsScreen() {
  const t = useTexts();
  const asked: Asked = useSearch({ from: "/console/events" });
  const looksUp = asked.type !== undefined || asked.correlation !== undefined;
  return (
    <>
      <div className="page-head">
        <h1>{t("events.title")}</h1>
      </div>
      <p className="quiet">{t("events.hint")}</p>
      <Form key={JSON.stringify(asked)} asked={asked} />
      {looksUp ? <Found asked={asked} /> : <Followed key={asked.lifecycle ?? ""} lifecycle={asked.lifecycle} />}
    </>
  );
}

function Form({ asked }: { asked: Asked }) {
  const t = useTexts();
  const navigate = useNavigate();
  const [chosen, choose] = useState(asked);
  const [type, correlation, lifecycle, since] = [useId(), useId(), useId(), useId()];
  const lifecycles = useQuery({
    queryKey: ["lifecycles"],
    queryFn: ({ signal }) => api.get("/lifecycles", { signal }),
    staleTime: Number.POSITIVE_INFINITY,
  });
  const named = (lifecycles.data?.items ?? []).filter((one) => chosen.lifecycle === undefined || one.name === chosen.lifecycle);
  const types = [...new Set(named.flatMap((one) => one.transitions.map((move) => move.event)))].sort();
  const set = (name: keyof Asked, value: string) => {
    const { [name]: _, ...rest } = chosen;
    choose(value === "" ? rest : { ...rest, [name]: value });
  };
  const go = (event: FormEvent) => {
    event.preventDefault();
    void navigate({ to: "/console/events", search: chosen });
  };
  return (
    <form className="card" onSubmit={go}>
      <div className="form-row">
        <div>
          <label htmlFor={lifecycle}>{t("jobs.lifecycle")}</label>
          <select id={lifecycle} value={chosen.lifecycle ?? ""} onChange={(event) => set("lifecycle", event.target.value)}>
            <option value="">{t("events.any")}</option>
            {(lifecycles.data?.items ?? []).map((one) => (
              <option key={one.name}>{one.name}</option>
            ))}
          </select>
        </div>
        <div>
          <label htmlFor={type}>{t("events.type")}</label>
          <select id={type} value={chosen.type ?? ""} onChange={(event) => set("type", event.target.value)}>
            <option value="">{t("events.any")}</option>
            {types.map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </div>
        <div>
          <label htmlFor={correlation}>{t("events.correlation")}</label>
          <input id={correlation} value={chosen.correlation ?? ""} maxLength={200} spellCheck={false} onChange={(event) => set("correlation", event.target.value)} />
        </div>
        <div>
          <label htmlFor={since}>{t("events.since")}</label>
          <select id={since} value={chosen.since ?? ""} onChange={(event) => set("since", event.target.value)}>
            <option value="">{t("events.since.ever")}</option>
            <option value="day">{t("events.since.day")}</option>
            <option value="hour">{t("events.since.hour")}</option>
          </select>
        </div>
      </div>
      <button type="submit" className="primary">
        {t("events.find")}
      </button>
    </form>
  );
}

function Found({ asked }: { asked: Asked }) {
  const t = useTexts();
  // The beginning is taken once for an address: a query that is repeated asks the same.
  const [begun] = useState(Date.now);
  const before = SINCE_MS[asked.since ?? ""];
  const since = before === undefined ? undefined : new Date(begun - before).toISOString();
  const query = {
    ...(asked.type === undefined ? {} : { type: asked.type }),
    ...(asked.correlation === undefined ? {} : { correlation_id: asked.correlation }),
    ...(asked.lifecycle === undefined ? {} : { lifecycle: asked.lifecycle }),
    ...(since === undefined ? {} : { since }),
    limit: SHOWN_MAX,
  };
  const found = useQuery({ queryKey: ["events", query], queryFn: ({ signal }) => api.get("/events", { query, signal }) });
  const words = { ...query, limit: String(SHOWN_MAX) };
  const named = pythonArguments({ type_: asked.type, correlation_id: asked.correlation, lifecycle: asked.lifecycle, limit: SHOWN_MAX });
  const find = `client.feed.find(${named}${since === undefined ? "" : `, since=datetime.fromisoformat(${pythonLiteral(since)})`}).items`;
  return (
    <>
      <Loaded query={found}>
        {(page) =>
          page.items.length === 0 ? (
            <Empty title={t("events.none")} hint={t("events.none.hint")} command="trellis events --follow" />
          ) : (
            <section className="card">
              <EventTable items={page.items} />
              {page.items.length === SHOWN_MAX && <p className="quiet">{t("events.more", { n: SHOWN_MAX })}</p>}
            </section>
          )
        }
      </Loaded>
      <SameElsewhere
        commands={commands({
          trellis: ["events", ...optionsOf({ type: asked.type, correlation: asked.correlation, lifecycle: asked.lifecycle, since, limit: SHOWN_MAX })],
          address: `/events?${new URLSearchParams(words)}`,
          python: since === undefined ? `print(${find})` : `from datetime import datetime\n\nprint(${find})`,
        })}
      />
    </>
  );
}

/** The feed from the moment the screen was opened: its events come as they happen, the newest first. */
function Followed({ lifecycle }: { lifecycle: string | undefined }) {
  const t = useTexts();
  const { clock } = useTimes();
  const [items, set] = useState<EventListed[]>([]);
  const [error, setError] = useState<unknown>(null);
  const [isOpen, open] = useState(false);
  const [begun] = useState(Date.now);
  const signalled = Object.values(useStore(changes)).reduce((sum, one) => sum + one, 0);
  const isLive = useStore(mode) === "live";
  const next = useRef(async () => {});
  useEffect(() => {
    const stop = new AbortController();
    let position = "latest";
    let asking = false;
    let again = false;
    next.current = async () => {
      again = asking;
      if (asking || document.hidden) return;
      asking = true;
      try {
        do {
          again = false;
          const query = { after: position, limit: SHOWN_MAX, ...(lifecycle === undefined ? {} : { lifecycle }) };
          const page = await api.get("/events", { query, signal: stop.signal });
          position = page.position ?? position;
          open(true);
          setError(null);
          if (page.items.length > 0) set((before) => [...page.items.toReversed(), ...before].slice(0, SHOWN_MAX));
        } while (again);
      } catch (caught) {
        if (!stop.signal.aborted) (setError(caught), failed(caught));
      } finally {
        asking = false;
      }
    };
    void next.current();
    return () => stop.abort();
  }, [lifecycle]);
  useEffect(() => void next.current(), [signalled, isLive]);
  useEffect(() => {
    if (isLive) return;
    const timer = setInterval(() => void next.current(), POLL_MS);
    return () => clearInterval(timer);
  }, [isLive]);
  return (
    <>
      {error !== null && <Failure error={error} />}
      {!isOpen && error === null && <Loading />}
      {isOpen && items.length === 0 && <Empty title={t("events.quiet", { time: clock(begun) })} />}
      {items.length > 0 && (
        <section className="card">
          <EventTable items={items} />
        </section>
      )}
      <SameElsewhere
        commands={commands({
          trellis: ["events", "--follow", ...(lifecycle === undefined ? [] : ["--lifecycle", lifecycle])],
          address: `/events?${new URLSearchParams({ after: "latest", ...(lifecycle === undefined ? {} : { lifecycle }) })}`,
          python: `print(client.feed.page("latest"${lifecycle === undefined ? "" : `, lifecycle=${pythonLiteral(lifecycle)}`}).position)`,
        })}
      />
    </>
  );
}

function EventTable({ items }: { items: EventListed[] }) {
  const t = useTexts();
  return (
    <Scroll label={t("events.title")}>
      <table>
        <thead>
          <tr>
            <th>{t("events.time")}</th>
            <th>{t("events.type")}</th>
            <th>{t("events.what")}</th>
            <th>{t("events.change")}</th>
            <th>{t("events.who")}</th>
            <th>{t("policy.why")}</th>
          </tr>
        </thead>
        <EventRows items={items} subject={(one) => <Subject event={one} />} />
      </table>
    </Scroll>
  );
}

function Subject({ event }: { event: EventListed }) {
  const id = event.job_id;
  if (event.lifecycle === "run") {
    return (
      <Link to="/console/runs/$runId" params={{ runId: id }}>
        {id}
      </Link>
    );
  }
  if (event.lifecycle === "proposal") {
    return (
      <Link to="/console/proposals" search={{ status: "all", id }}>
        {id}
      </Link>
    );
  }
  return (
    <Link to="/console/jobs/$jobId" params={{ jobId: id }}>
      {id}
    </Link>
  );
}
