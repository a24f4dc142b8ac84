/** Times and durations for people. */

import { language } from "./preferences";
import { useStore } from "./store";

export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const value = Math.max(0, seconds);
  if (value < 1) return `${Math.round(value * 1_000)} ms`;
  if (value < 10) return `${Number(value.toFixed(1))} s`;
  if (value < 60) return `${Math.round(value)} s`;
  if (value < 3_600) return two(value, 60, "min", "s");
  if (value < 86_400) return two(value / 60, 60, "h", "min");
  return two(value / 3_600, 24, "d", "h");
}

function two(value: number, size: number, large: string, small: string): string {
  const whole = Math.round(value);
  const rest = whole % size;
  return `${Math.floor(whole / size)} ${large}${rest === 0 ? "" : ` ${rest} ${small}`}`;
}

export function between(from: string, to: string | number): number {
  return ((typeof to === "number" ? to : Date.parse(to)) - Date.parse(from)) / 1_000;
}

interface Formats {
  clock: Intl.DateTimeFormat;
  full: Intl.DateTimeFormat;
  relative: Intl.RelativeTimeFormat;
}

/** To make a format costs forty times as much as to use it, and a table uses one in each row. */
const made = new Map<string, Formats>();

function formats(locale: string): Formats {
  const known = made.get(locale);
  if (known !== undefined) return known;
  const fresh = {
    clock: new Intl.DateTimeFormat(locale, { timeStyle: "medium" }),
    full: new Intl.DateTimeFormat(locale, { dateStyle: "medium", timeStyle: "medium" }),
    relative: new Intl.RelativeTimeFormat(locale, { numeric: "auto", style: "short" }),
  };
  made.set(locale, fresh);
  return fresh;
}

export function useTimes(): { clock: (time: number | string) => string; full: (time: string) => string; ago: (time: string) => string } {
  const { clock, full, relative } = formats(useStore(language) === "uk" ? "uk-UA" : "en-GB");
  return {
    clock: (time) => shown(clock, time),
    full: (time) => shown(full, time),
    ago: (time) => {
      const seconds = (Date.parse(time) - Date.now()) / 1_000;
      const size = Math.abs(seconds);
      if (size < 60) return relative.format(Math.round(seconds), "second");
      if (size < 3_600) return relative.format(Math.round(seconds / 60), "minute");
      if (size < 86_400) return relative.format(Math.round(seconds / 3_600), "hour");
      return relative.format(Math.round(seconds / 86_400), "day");
    },
  };
}

/** Unlike a Date, a format throws for what is no time. */
function shown(format: Intl.DateTimeFormat, time: number | string): string {
  const date = new Date(time);
  return Number.isNaN(date.getTime()) ? "Invalid Date" : format.format(date);
}
