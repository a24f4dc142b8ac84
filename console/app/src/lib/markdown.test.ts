import { describe, expect, it } from "vitest";
import { blocksOf } from "./markdown";

describe("blocksOf", () => {
  it("reads what runbooks use", () => {
    const blocks = blocksOf("# Jobs wait\n\nA job\nwaits. See [the page](x.md).\n\n1. `trellis queues` shows\n   the **type**.\n2. Two\n\n```sh\ntrellis workers\n```\n");
    expect(blocks.map((one) => one.kind)).toEqual(["heading", "paragraph", "list", "code"]);
    expect(blocks[1]).toEqual({ kind: "paragraph", spans: [{ kind: "text", text: "A job waits. See the page." }] });
    expect(blocks[2]).toMatchObject({
      ordered: true,
      items: [
        [
          { kind: "code", text: "trellis queues" },
          { kind: "text", text: " shows the " },
          { kind: "strong", text: "type" },
          { kind: "text", text: "." },
        ],
        [{ kind: "text", text: "Two" }],
      ],
    });
    expect(blocks[3]).toEqual({ kind: "code", text: "trellis workers" });
  });

  it("keeps markup as text", () => {
    expect(blocksOf("<script>x</script>")).toEqual([{ kind: "paragraph", spans: [{ kind: "text", text: "<script>x</script>" }] }]);
  });
});
