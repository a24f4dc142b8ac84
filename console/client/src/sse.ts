/** Reads a stream of server-sent events from text that arrives in pieces of any size. */

export interface ServerSentEvent {
  /** The last id that the stream has sent, also when this event has none of its own. */
  id: string | null;
  event: string;
  data: string;
}

export interface SseListener {
  /** An event with data. */
  onEvent(event: ServerSentEvent): void;
  /** An id without data: the position moved along, and nothing happened. */
  onPosition?(id: string): void;
  /** How long to wait before the next connection, in milliseconds. */
  onRetry?(milliseconds: number): void;
}

const RETRY_MS_MAX = 60_000;

export class SseParser {
  #rest = "";
  #data: string[] = [];
  #event = "";
  #id: string | null;
  #hasNewId = false;
  #endedWithCr = false;
  readonly #listener: SseListener;

  constructor(listener: SseListener, lastId: string | null = null) {
    this.#listener = listener;
    this.#id = lastId;
  }

  push(text: string): void {
    let input = text;
    if (this.#endedWithCr && input.startsWith("\n")) input = input.slice(1);
    if (input === "") return;
    this.#endedWithCr = input.endsWith("\r");
    const lines = (this.#rest + input).split(/\r\n|\n|\r/);
    this.#rest = lines.pop() ?? "";
    for (const line of lines) this.#line(line);
  }

  #line(line: string): void {
    if (line === "") return this.#dispatch();
    if (line.startsWith(":")) return;
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
    else if (name === "id" && !value.includes("\0")) {
      this.#id = value;
      this.#hasNewId = true;
    } else if (name === "retry" && /^\d+$/.test(value)) {
      this.#listener.onRetry?.(Math.min(Number(value), RETRY_MS_MAX));
    }
  }

  #dispatch(): void {
    const data = this.#data;
    const event = this.#event || "message";
    this.#data = [];
    this.#event = "";
    if (data.length > 0) this.#listener.onEvent({ id: this.#id, event, data: data.join("\n") });
    else if (this.#hasNewId && this.#id !== null) this.#listener.onPosition?.(this.#id);
    this.#hasNewId = false;
  }
}
