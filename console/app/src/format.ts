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

export function useTimes(): { clock: (time: number | string) => string; full: (time: string) => string; ago: (time: string) => string } {
  const locale = useStore(language) === "uk" ? "uk-UA" : "en-GB";
  const relative = new Intl.RelativeTimeFormat(locale, { numeric: "auto", style: "short" });
  return {
    clock: (time) => new Date(time).toLocaleTimeString(locale),
    full: (time) => new Date(time).toLocaleString(locale, { dateStyle: "medium", timeStyle: "medium" }),
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
