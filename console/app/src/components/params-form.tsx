/** Names and values of parameters, one row each. */

import { ROWS_MAX, type Row } from "../lib/params";
import { useTexts } from "../texts";

export function ParamsForm({ rows, onChange }: { rows: Row[]; onChange: (rows: Row[]) => void }) {
  const t = useTexts();
  const change = (at: number, changed: Partial<Row>) => onChange(rows.map((one, index) => (index === at ? { ...one, ...changed } : one)));
  return (
    <fieldset className="params">
      <legend>{t("agents.params")}</legend>
      <p className="quiet">{t("agents.params.hint")}</p>
      {rows.map((one, at) => (
        <div className="row" key={at}>
          <input
            aria-label={t("agents.params.name", { n: at + 1 })}
            placeholder="topic"
            value={one.name}
            spellCheck={false}
            onChange={(event) => change(at, { name: event.target.value })}
          />
          <input
            className="grow"
            aria-label={t("agents.params.value", { n: at + 1 })}
            value={one.value}
            onChange={(event) => change(at, { value: event.target.value })}
          />
          <button type="button" className="small" aria-label={t("agents.params.remove", { n: at + 1 })} onClick={() => onChange(rows.filter((_, index) => index !== at))}>
            ×
          </button>
        </div>
      ))}
      {rows.length < ROWS_MAX && (
        <button type="button" className="small" onClick={() => onChange([...rows, { name: "", value: "" }])}>
          {t("agents.params.add")}
        </button>
      )}
    </fieldset>
  );
}
