/** The safety policy: what it decides about a job and why, and what another policy would have decided. */

import { useMutation } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { useId, useState, type FormEvent } from "react";
import { api, type Explanation, type Simulation } from "../api";
import { Scroll } from "../components/operation-parts";
import { Empty, Failure, Json, SameElsewhere } from "../components/parts";
import { commands, pythonLiteral } from "../lib/commands";
import { failed } from "../live";
import { useTexts } from "../texts";

const TOPIC = "[A-Za-z0-9_\\-]+(\\.[A-Za-z0-9_\\-]+){0,15}";
const FIELD_MAX = 200;
const POLICY_MAX = 200_000;
const LAST_DEFAULT = 100;
const IMPORT = "from pathlib import Path\n\n";
const READ = 'Path("policy.toml").read_text()';
const EXAMPLE = `[[rules]]
id = "no-deletes-by-services"
decision = "deny"
reason = "only a person may delete"
match = { topics = ["job.*.delete"], actor_types = ["service"] }

[[rules]]
id = "everything-else"
decision = "allow"
match = { topics = ["job.>"] }
`;

interface Asked {
  topic: string;
  tenant: string;
  principal: string;
  actor: "" | "human" | "service";
  capability: string;
  tags: string;
}

function requestOf(asked: Asked) {
  const tags = asked.tags.split(/[\s,]+/).filter(Boolean);
  const meta = {
    ...(asked.actor === "" ? {} : { actor_type: asked.actor }),
    ...(asked.capability === "" ? {} : { capability: asked.capability }),
    ...(tags.length === 0 ? {} : { risk_tags: tags }),
  };
  return {
    topic: asked.topic,
    ...(asked.tenant === "" ? {} : { tenant_id: asked.tenant }),
    ...(asked.principal === "" ? {} : { principal_id: asked.principal }),
    ...(Object.keys(meta).length === 0 ? {} : { meta }),
  };
}

function explainWords(asked: Asked): string[] {
  const tags = asked.tags.split(/[\s,]+/).filter(Boolean);
  const option = (name: string, value: string) => (value === "" ? [] : [name, value]);
  return [
    ...option("--topic", asked.topic),
    ...option("--tenant", asked.tenant),
    ...option("--principal", asked.principal),
    ...option("--actor-type", asked.actor),
    ...option("--capability", asked.capability),
    ...tags.flatMap((tag) => ["--risk-tag", tag]),
  ];
}

export function Policy() {
  const t = useTexts();
  const [policy, setPolicy] = useState("");
  return (
    <>
      <div className="page-head">
        <h1>{t("policy.title")}</h1>
      </div>
      <p className="quiet">{t("policy.hint")}</p>
      <Explain policy={policy} />
      <Simulate policy={policy} setPolicy={setPolicy} />
    </>
  );
}

function Explain({ policy }: { policy: string }) {
  const t = useTexts();
  const navigate = useNavigate();
  const search = useSearch({ from: "/console/policy" });
  const [asked, set] = useState<Asked>({ topic: search.topic ?? "job.code.lint", tenant: "", principal: "", actor: "", capability: "", tags: "" });
  const body = () => ({ request: requestOf(asked), ...(policy.trim() === "" ? {} : { policy }) });
  const sent = useMutation({
    // The gateway fills the fields that a request leaves out.
    mutationFn: () => api.post("/safety/explain", { body: body() as never }),
    onError: failed,
  });
  const go = (event: FormEvent) => {
    event.preventDefault();
    void navigate({ to: "/console/policy", search: { topic: asked.topic }, replace: true });
    sent.mutate();
  };
  const field = (name: Exclude<keyof Asked, "actor">, more: object = {}) => (
    <TextField key={name} label={t(`policy.${name}`)} value={asked[name]} onChange={(value) => set({ ...asked, [name]: value })} {...more} />
  );
  const actor = useId();
  return (
    <section className="card">
      <h2>{t("policy.explain")}</h2>
      <form onSubmit={go}>
        <div className="form-row">
          {field("topic", { required: true, pattern: TOPIC })}
          {field("tenant")}
          {field("principal")}
          <div>
            <label htmlFor={actor}>{t("policy.actor")}</label>
            <select id={actor} value={asked.actor} onChange={(event) => set({ ...asked, actor: event.target.value as Asked["actor"] })}>
              <option value="">–</option>
              <option value="human">human</option>
              <option value="service">service</option>
            </select>
          </div>
          {field("capability")}
          {field("tags")}
        </div>
        <div className="row">
          <button type="submit" className="primary" disabled={sent.isPending}>
            {t("policy.ask")}
          </button>
          {policy.trim() !== "" && <span className="badge warn">{t("policy.yours")}</span>}
        </div>
      </form>
      {sent.error !== null && <Failure error={sent.error} />}
      {sent.data !== undefined && <Decision found={sent.data} />}
      <SameElsewhere
        commands={commands({
          trellis: ["policy", "explain", ...explainWords(asked), ...(policy.trim() === "" ? [] : ["--policy", "policy.toml"])],
          method: "POST",
          address: "/safety/explain",
          body: body(),
          python: policy.trim() === "" ? `print(client.safety.explain(${pythonLiteral(requestOf(asked))}))` : `${IMPORT}print(client.safety.explain(${pythonLiteral(requestOf(asked))}, policy=${READ}))`,
        })}
      />
    </section>
  );
}

function TextField({ label, value, onChange, ...more }: { label: string; value: string; onChange: (value: string) => void; required?: boolean; pattern?: string }) {
  const id = useId();
  return (
    <div>
      <label htmlFor={id}>{label}</label>
      <input id={id} value={value} maxLength={FIELD_MAX} spellCheck={false} autoComplete="off" onChange={(event) => onChange(event.target.value)} {...more} />
    </div>
  );
}

function DecisionBadge({ decision }: { decision: string }) {
  const kind = decision.startsWith("allow") ? "good" : decision === "deny" ? "bad" : "warn";
  return <span className={`badge ${kind}`}>{decision.replaceAll("_", " ")}</span>;
}

function Decision({ found }: { found: Explanation }) {
  const t = useTexts();
  return (
    <div className="verdict" role="status">
      <p>
        <DecisionBadge decision={found.decision} /> {t("policy.by", { rule: found.rule })}
        {found.reason !== "" && found.reason !== `rule ${found.rule}` && `: ${found.reason}`}
      </p>
      {found.looked.length > 0 && (
        <Scroll label={t("policy.explain")}>
          <table>
            <thead>
              <tr>
                <th>{t("authority.rule")}</th>
                <th>{t("policy.decision")}</th>
                <th>{t("policy.fits")}</th>
                <th>{t("policy.why")}</th>
              </tr>
            </thead>
            <tbody>
              {found.looked.map((one) => (
                <tr key={one.rule} className={one.rule === found.rule ? "chosen" : ""}>
                  <td className="mono">{one.rule}</td>
                  <td>
                    <DecisionBadge decision={one.decision} />
                  </td>
                  <td>{t(one.fits ? "policy.fits.yes" : "policy.fits.no")}</td>
                  <td>{one.why}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      {found.not_looked.length > 0 && <p className="quiet">{t("policy.notLooked", { rules: found.not_looked.join(", ") })}</p>}
      {found.constraints !== null && <Json value={found.constraints} title={t("policy.constraints")} />}
      <p className="quiet">
        {t("policy.hash")} <code>{found.policy_hash.slice(0, 12)}</code>
      </p>
    </div>
  );
}

function Simulate({ policy, setPolicy }: { policy: string; setPolicy: (text: string) => void }) {
  const t = useTexts();
  const [text, last] = [useId(), useId()];
  const [number, setNumber] = useState(String(LAST_DEFAULT));
  const wanted = Math.min(Math.max(Math.trunc(Number(number)) || LAST_DEFAULT, 1), 1_000);
  const sent = useMutation({
    mutationFn: () => api.post("/safety/simulate", { body: { policy, last: wanted } }),
    onError: failed,
  });
  return (
    <section className="card">
      <h2>{t("policy.simulate")}</h2>
      <p className="quiet">{t("policy.simulate.hint")}</p>
      <label htmlFor={text}>{t("policy.text")}</label>
      <textarea id={text} className="mono tall" value={policy} maxLength={POLICY_MAX} spellCheck={false} placeholder={EXAMPLE} onChange={(event) => setPolicy(event.target.value)} />
      <div className="row">
        <label className="inline" htmlFor={last}>
          {t("policy.last")}
        </label>
        <input id={last} className="short" inputMode="numeric" value={number} onChange={(event) => setNumber(event.target.value)} />
        <button type="button" className="primary" disabled={sent.isPending || policy.trim() === ""} onClick={() => sent.mutate()}>
          {t("policy.try")}
        </button>
        {policy === "" && (
          <button type="button" onClick={() => setPolicy(EXAMPLE)}>
            {t("policy.example")}
          </button>
        )}
      </div>
      {sent.error !== null && <Failure error={sent.error} />}
      {sent.data !== undefined && <Simulated found={sent.data} />}
      <SameElsewhere
        commands={commands({
          trellis: ["policy", "simulate", "policy.toml", "--last", String(wanted)],
          method: "POST",
          address: "/safety/simulate",
          body: { policy, last: wanted },
          python: `${IMPORT}print(client.safety.simulate(${READ}, last=${wanted}))`,
        })}
      />
    </section>
  );
}

function Simulated({ found }: { found: Simulation }) {
  const t = useTexts();
  if (found.items.length === 0) return <Empty title={t("policy.nojobs")} command="trellis submit --topic job.code.lint '{}'" />;
  return (
    <div className="verdict" role="status">
      <p>{t("policy.changed", { n: found.changed, of: found.items.length })}</p>
      <Scroll label={t("policy.simulate")}>
        <table>
          <thead>
            <tr>
              <th>{t("jobs.id")}</th>
              <th>{t("policy.topic")}</th>
              <th>{t("policy.before")}</th>
              <th>{t("policy.after")}</th>
              <th>{t("policy.why")}</th>
            </tr>
          </thead>
          <tbody>
            {[...found.items]
              .sort((a, b) => Number(b.changes) - Number(a.changes))
              .map((one) => (
                <tr key={one.job_id} className={one.changes ? "chosen" : ""}>
                  <td className="mono">{one.job_id}</td>
                  <td className="mono">{one.topic}</td>
                  <td>
                    {one.before === null ? "–" : <DecisionBadge decision={one.before} />} <span className="quiet">{one.before_rule}</span>
                  </td>
                  <td>
                    <DecisionBadge decision={one.after} /> <span className="quiet">{one.after_rule}</span>
                  </td>
                  <td>{one.reason}</td>
                </tr>
              ))}
          </tbody>
        </table>
      </Scroll>
    </div>
  );
}
