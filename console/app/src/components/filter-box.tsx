/** The box for the filter language, with completion. What is typed goes into the address after a moment. */

import { useEffect, useId, useRef, useState, type KeyboardEvent } from "react";
import { complete, TEXT_MAX, type Filter, type FilterFields } from "../lib/filter";
import { useTexts } from "../texts";
import { useKeys } from "./parts";

const SETTLE_MS = 250;

export function FilterBox({
  value,
  onChange,
  fields,
  filter,
  example,
}: {
  value: string;
  onChange: (text: string) => void;
  fields: FilterFields;
  filter: Filter;
  example: string;
}) {
  const t = useTexts();
  const [text, setText] = useState(value);
  const [open, setOpen] = useState(false);
  const [chosen, choose] = useState(-1);
  const input = useRef<HTMLInputElement>(null);
  const list = useId();
  const sent = useRef(value);
  useEffect(() => {
    if (value !== sent.current) setText((sent.current = value));
  }, [value]);
  useEffect(() => {
    if (text === sent.current) return;
    const timer = setTimeout(() => onChange((sent.current = text)), SETTLE_MS);
    return () => clearTimeout(timer);
  }, [text, onChange]);
  useKeys({ "/": () => input.current?.focus() });

  const offers = open ? complete(text, fields) : [];
  const take = (at: number) => {
    setText(offers[at]?.text ?? text);
    choose(-1);
    input.current?.focus();
  };
  const pressed = (event: KeyboardEvent) => {
    if (event.key === "Escape") setOpen(false);
    else if (event.key === "Enter" && chosen >= 0) {
      event.preventDefault();
      take(chosen);
    } else if (event.key === "Tab" && chosen >= 0) {
      event.preventDefault();
      take(chosen);
    } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && offers.length > 0) {
      event.preventDefault();
      choose((chosen + (event.key === "ArrowDown" ? 1 : offers.length - (chosen < 0 ? 0 : 1))) % offers.length);
    }
  };
  return (
    <div className="filter">
      <input
        ref={input}
        role="combobox"
        aria-label={t("common.filter")}
        aria-expanded={offers.length > 0}
        aria-controls={list}
        aria-autocomplete="list"
        aria-activedescendant={chosen >= 0 ? `${list}-${chosen}` : undefined}
        value={text}
        maxLength={TEXT_MAX}
        placeholder={example}
        spellCheck={false}
        autoComplete="off"
        onChange={(event) => (setText(event.target.value), setOpen(true), choose(-1))}
        onFocus={() => setOpen(true)}
        onBlur={() => setOpen(false)}
        onKeyDown={pressed}
      />
      <ul id={list} role="listbox" aria-label={t("common.filter")} hidden={offers.length === 0}>
        {offers.map((one, at) => (
          <li
            key={one.label}
            id={`${list}-${at}`}
            role="option"
            aria-selected={at === chosen}
            onMouseDown={(event) => (event.preventDefault(), take(at))}
          >
            {one.label}
          </li>
        ))}
      </ul>
      {filter.unknown.length > 0 && (
        <p className="quiet" role="status">
          {t("common.filter.unknown", { what: filter.unknown.join(", ") })}
        </p>
      )}
    </div>
  );
}
