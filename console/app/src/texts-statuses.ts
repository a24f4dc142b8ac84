/**
 * Statuses in Ukrainian. A status is an identifier of the API: English shows it as it is, and wherever a person types or
 * compares it (filters, commands, diagrams, raw JSON) it stays as it is in every language.
 */

import { language, type Language } from "./preferences";
import { useStore } from "./store";

const UK: Record<string, string> = {
  // Runs and leased jobs
  requested: "запитано",
  queued: "у черзі",
  assigned: "призначено",
  running: "виконується",
  completed: "завершено",
  succeeded: "успішно",
  failed: "не вдалося",
  cancelled: "скасовано",
  dead_lettered: "недоставлено",
  suspended: "чекає на подію",
  // Jobs of the job queue
  PENDING: "очікує",
  QUEUED: "у черзі",
  CONTEXT_ASSEMBLY: "збирає контекст",
  NOTEBOOKLM_CALL: "запитує модель",
  ARTIFACT_WRITE: "пише артефакт",
  RETRY_BACKOFF: "чекає на повтор",
  COMPLETE: "завершено",
  FAILED: "не вдалося",
  DEAD: "недоставлено",
  DISCARDED: "відкинуто",
  // Jobs on topics
  SCHEDULED: "заплановано",
  DISPATCHED: "надіслано",
  RUNNING: "виконується",
  SUCCEEDED: "успішно",
  CANCELLED: "скасовано",
  DENIED: "відмовлено",
  TIMEOUT: "час вийшов",
  // Jobs of the NLM backend
  ACCEPTED: "прийнято",
  FETCHING_CONTEXT: "читає контекст",
  BUILDING_PROMPT: "складає запит",
  NLM_QUERY: "запитує модель",
  STRUCTURING: "упорядковує",
  CALLBACK: "повідомляє",
  DONE: "зроблено",
  ERROR: "помилка",
  // Proposals, inbox entries and artifacts
  pending: "очікує",
  approved: "схвалено",
  auto_approved: "схвалено автоматично",
  applying: "застосовується",
  applied: "застосовано",
  rejected: "відхилено",
  expired: "прострочено",
  processed: "оброблено",
  staged: "підготовлено",
  finalized: "остаточно",
  discarded: "відкинуто",
  removed: "вилучено",
  // Agents and workers
  draft: "чернетка",
  active: "активний",
  paused: "призупинено",
  error: "помилка",
  archived: "в архіві",
  malformed: "пошкоджено",
  alive: "працює",
  silent: "мовчить",
  drained: "звільнено",
};

/** A status for people. One that has no translation is shown as it is. */
export function statusText(chosen: Language, value: string): string {
  return (chosen === "uk" ? UK[value] : undefined) ?? value.replaceAll("_", " ");
}

/** The text of a status, and the identifier for a tooltip where it is another one. */
export function useStatusText(): (value: string) => { text: string; title?: string } {
  const chosen = useStore(language);
  return (value) => (chosen === "en" ? { text: statusText(chosen, value) } : { text: statusText(chosen, value), title: value });
}
