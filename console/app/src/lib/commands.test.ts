import { describe, expect, it } from "vitest";
import { commands, pythonLiteral, shellWord, typed } from "./commands";

describe("commands", () => {
  it("quotes what a shell or Python would read otherwise", () => {
    expect(shellWord("it's; rm -rf $HOME")).toBe("'it'\\''s; rm -rf $HOME'");
    expect(shellWord("prop_2026-02-14_0123")).toBe("prop_2026-02-14_0123");
    expect(pythonLiteral({ a: [true, null, 'x"y'] })).toBe('{"a": [True, None, "x\\"y"]}');
  });

  it("writes one act three ways, and names the gateway in each", () => {
    const made = commands({
      trellis: ["proposals", "reject", "prop_1", "--note", "says otherwise"],
      method: "PATCH",
      address: "/proposals/prop_1",
      body: { decision: "reject" },
      headers: { "If-Match": '"1"' },
      python: "client.proposals.get('prop_1')",
      gateway: "https://trellis.example",
    });
    expect(made.trellis).toBe("trellis proposals reject prop_1 --note 'says otherwise' --gateway https://trellis.example");
    expect(made.curl).toBe(
      `curl -sS -X PATCH -H "Authorization: Bearer $TRELLIS_TOKEN" -H 'If-Match: "1"' -H 'Content-Type: application/json' -d '{"decision":"reject"}' https://trellis.example/proposals/prop_1`,
    );
    expect(made.python).toContain('with connect_sync("https://trellis.example") as client:');
    expect(made.python).toContain("    client.proposals.get('prop_1')");
  });

  it("writes a line for each request where one is not enough", () => {
    const made = commands({ trellis: ["x"], method: "POST", address: "/x", bodies: [{ n: 1 }, { n: 2 }], gateway: "https://trellis.example" });
    expect(made.curl.split("\n").map((line) => /-d '(.*)' https/.exec(line)?.[1])).toEqual(['{"n":1}', '{"n":2}']);
  });

  it("names the gateway in a hint, unless its command has no option for one", () => {
    const at = (text: string) => typed(text, "https://trellis.example");
    expect(at("trellis dlq list")).toBe("trellis dlq list --gateway https://trellis.example");
    for (const local of ["trellis worker MODULE:APP", "trellis agents create notes", "trellis up --roles alerts", "make console"]) expect(at(local)).toBe(local);
  });

  it("gives a command no gateway that it has no option for", () => {
    const made = commands({ trellis: ["alerts", "runbook", "jobs-wait"], address: "/runbooks/jobs-wait", isLocal: true, gateway: "https://trellis.example" });
    expect(made.trellis).toBe("trellis alerts runbook jobs-wait");
  });
});
