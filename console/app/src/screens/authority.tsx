/** Authority: which role may do what, and why a call was refused. */

import { useQuery } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { Fragment, useId, useState } from "react";
import { api } from "../api";
import { Loaded } from "../components/operation-parts";
import { Command, Empty, SameElsewhere } from "../components/parts";
import { groupOf, rolesOf, rulesLike, verdictOf, type Rule } from "../lib/authority";
import { commands } from "../lib/commands";
import { session } from "../session";
import { useStore } from "../store";
import { useTexts } from "../texts";

const WORDS_MAX = 100;

export function Authority() {
  const t = useTexts();
  const authority = useQuery({
    queryKey: ["authority"],
    queryFn: ({ signal }) => api.get("/authority", { signal }),
    staleTime: Number.POSITIVE_INFINITY,
  });
  return (
    <>
      <div className="page-head">
        <h1>{t("authority.title")}</h1>
      </div>
      <Loaded query={authority}>
        {(page) => (
          <>
            <WhyRefused rules={page.items} />
            <Matrix rules={page.items} />
          </>
        )}
      </Loaded>
      <SameElsewhere
        commands={commands({
          trellis: ["authority"],
          address: "/authority",
          python: "print(client.system.authority().items)",
        })}
      />
    </>
  );
}

function useChosen(rules: Rule[]) {
  const mine = useStore(session)?.roles ?? [];
  const navigate = useNavigate();
  const { rule, role } = useSearch({ from: "/console/authority" });
  const roles = role === undefined ? mine : [role];
  const go = (next: { rule?: string; role?: string }) => void navigate({ to: "/console/authority", search: next, replace: true });
  return { rule: rules.find((one) => one.name === rule), asked: rule, role, roles, go };
}

/** A role and an action in, the cell of the table that decides out. */
function WhyRefused({ rules }: { rules: Rule[] }) {
  const t = useTexts();
  const [first, second] = [useId(), useId()];
  const { rule, asked, role, roles, go } = useChosen(rules);
  const optional = (name: "rule" | "role", value: string | undefined) => (value === undefined || value === "" ? {} : { [name]: value });
  return (
    <section className="card">
      <h2>{t("authority.why")}</h2>
      <p className="quiet">{t("authority.why.hint")}</p>
      <div className="form-row">
        <div>
          <label htmlFor={first}>{t("authority.role")}</label>
          <select id={first} value={role ?? ""} onChange={(event) => go({ ...optional("rule", asked), ...optional("role", event.target.value) })}>
            <option value="">{t("authority.mine")}</option>
            {rolesOf(rules).map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </div>
        <div>
          <label htmlFor={second}>{t("authority.action")}</label>
          <select id={second} value={rule?.name ?? ""} onChange={(event) => go({ ...optional("rule", event.target.value), ...optional("role", role) })}>
            <option value="">{t("authority.choose")}</option>
            {rules.map((one) => (
              <option key={one.name} value={one.name}>
                {one.action} ({one.name})
              </option>
            ))}
          </select>
        </div>
      </div>
      {rule !== undefined && <VerdictText rule={rule} roles={roles} />}
    </section>
  );
}

function VerdictText({ rule, roles }: { rule: Rule; roles: string[] }) {
  const t = useTexts();
  const verdict = verdictOf(rule, roles);
  const held = roles.join(", ") || "–";
  const by = verdict.by.join(", ");
  return (
    <div className={`verdict ${verdict.grant}`} role="status">
      <p>
        <span className={`badge ${verdict.grant === "yes" ? "good" : verdict.grant === "own" ? "warn" : "bad"}`}>{t(`authority.${verdict.grant}`)}</span>{" "}
        {verdict.grant === "no"
          ? t("authority.verdict.no", { roles: held, action: rule.action })
          : t(`authority.verdict.${verdict.grant}`, { roles: by, action: rule.action })}
      </p>
      <dl className="facts">
        <dt>{t("authority.rule")}</dt>
        <dd>
          <code>{rule.name}</code>: {roles.map((role) => `${role} = ${rule.grants[role] ?? "no"}`).join(", ")}
        </dd>
        <dt>{t("authority.source")}</dt>
        <dd>{rule.source}</dd>
        <dt>{t("authority.holders")}</dt>
        <dd>
          {verdict.holders.length === 0
            ? t("authority.nobody")
            : verdict.holders.map((one) => (
                <span key={one} className="chip">
                  {one}
                  {rule.grants[one] === "own" && ` (${t("authority.own")})`}
                </span>
              ))}
        </dd>
      </dl>
      {verdict.grant !== "yes" && verdict.holders.length > 0 && (
        <>
          <p className="quiet">{t("authority.way")}</p>
          <Command text={`trellis token issue --role ${verdict.holders.find((one) => rule.grants[one] === "yes") ?? verdict.holders[0]}`} />
        </>
      )}
    </div>
  );
}

function Matrix({ rules }: { rules: Rule[] }) {
  const t = useTexts();
  const field = useId();
  const [text, setText] = useState("");
  const { rule: chosen, roles: asked, go } = useChosen(rules);
  const roles = rolesOf(rules);
  const shown = rulesLike(rules, text);
  const groups = [...new Set(shown.map(groupOf))];
  return (
    <section className="card">
      <div className="row">
        <h2 className="grow">{t("authority.matrix")}</h2>
        <label className="hidden" htmlFor={field}>
          {t("common.filter")}
        </label>
        <input id={field} className="narrow" value={text} maxLength={WORDS_MAX} placeholder="jobs cancel" onChange={(event) => setText(event.target.value)} />
      </div>
      <div className="legend">
        {(["yes", "own", "no"] as const).map((grant) => (
          <span key={grant}>
            <span className={`cell ${grant}`} aria-hidden="true" />{" "}
            {t(`authority.${grant}`)}
          </span>
        ))}
      </div>
      {shown.length === 0 ? (
        <Empty title={t("authority.none")} />
      ) : (
        <div className="scroll-x" tabIndex={0} role="group" aria-label={t("authority.matrix")}>
          <table className="matrix">
            <thead>
              <tr>
                <th scope="col">{t("authority.action")}</th>
                {roles.map((role) => (
                  <th key={role} scope="col" className={asked.includes(role) ? "mine" : ""}>
                    <span className="turned">{role}</span>
                  </th>
                ))}
              </tr>
            </thead>
            {groups.map((group) => (
              <Fragment key={group}>
                <tbody>
                  <tr className="group">
                    <th scope="rowgroup" colSpan={roles.length + 1}>
                      {group}
                    </th>
                  </tr>
                  {shown
                    .filter((rule) => groupOf(rule) === group)
                    .map((rule) => (
                      <tr key={rule.name} className={rule === chosen ? "chosen" : ""}>
                        <th scope="row">
                          <button type="button" className="plain link" onClick={() => go({ rule: rule.name })}>
                            {rule.action}
                          </button>
                          <span className="quiet mono"> {rule.name}</span>
                        </th>
                        {roles.map((role) => {
                          const grant = rule.grants[role] ?? "no";
                          return (
                            <td key={role} className={asked.includes(role) ? "mine" : ""}>
                              <span className={`cell ${grant}`}>{grant}</span>
                            </td>
                          );
                        })}
                      </tr>
                    ))}
                </tbody>
              </Fragment>
            ))}
          </table>
        </div>
      )}
    </section>
  );
}
