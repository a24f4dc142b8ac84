import { describe, expect, it } from "vitest";
import { SseParser, type ServerSentEvent } from "./sse.js";

function read(pieces: string[]): { events: ServerSentEvent[]; positions: string[]; retries: number[] } {
  const seen = { events: [] as ServerSentEvent[], positions: [] as string[], retries: [] as number[] };
  const parser = new SseParser({
    onEvent: (event) => seen.events.push(event),
    onPosition: (id) => seen.positions.push(id),
    onRetry: (ms) => seen.retries.push(ms),
  });
  for (const piece of pieces) parser.push(piece);
  return seen;
}

const STREAM = 'retry: 1874\nid: 0041\n\nid: 0042\ndata: {"a":1}\n\n: keep-alive\n\ndata: one\r\ndata: two\r\n\r\nid: 43\r\rdata: ]]>\n\n';

describe("SseParser", () => {
  it("reads ids, data of several lines, comments, retry and every kind of line end", () => {
    expect(read([STREAM])).toEqual({
      events: [
        { id: "0042", event: "message", data: '{"a":1}' },
        { id: "0042", event: "message", data: "one\ntwo" },
        { id: "43", event: "message", data: "]]>" },
      ],
      positions: ["0041", "43"],
      retries: [1874],
    });
  });

  it("reads the same from pieces of any size", () => {
    for (let size = 1; size < 12; size += 1) {
      const pieces = STREAM.match(new RegExp(`[\\s\\S]{1,${size}}`, "g")) ?? [];
      expect(read(pieces)).toEqual(read([STREAM]));
    }
  });

  it("keeps an event that has not ended to itself", () => {
    expect(read(["id: 1\ndata: half"]).events).toEqual([]);
  });

  it("bounds how long a server may make it wait", () => {
    expect(read(["retry: 99999999\n\n"]).retries).toEqual([60_000]);
  });
});
