/** Language and theme, kept in this browser. */

import { Store } from "./store";

export type Theme = "system" | "dark" | "light";
export type Language = "en" | "uk";

const THEMES: readonly Theme[] = ["system", "dark", "light"];

export const theme = new Store<Theme>(chosen("trellis.theme", THEMES) ?? "system");
export const language = new Store<Language>(
  chosen<Language>("trellis.language", ["en", "uk"]) ?? (navigator.language.toLowerCase().startsWith("uk") ? "uk" : "en"),
);

export function applyPreferences(): void {
  const root = document.documentElement;
  const show = () => {
    if (theme.value === "system") delete root.dataset["theme"];
    else root.dataset["theme"] = theme.value;
    root.lang = language.value;
  };
  theme.subscribe(() => (localStorage.setItem("trellis.theme", theme.value), show()));
  language.subscribe(() => (localStorage.setItem("trellis.language", language.value), show()));
  show();
}

export function nextTheme(): void {
  theme.set(THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length] ?? "system");
}

function chosen<T extends string>(key: string, allowed: readonly T[]): T | null {
  const kept = localStorage.getItem(key);
  return allowed.find((one) => one === kept) ?? null;
}
