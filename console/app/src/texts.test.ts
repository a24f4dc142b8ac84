import { beforeAll, describe, expect, it, vi } from "vitest";

// The module reads the browser's preferences when it is loaded.
beforeAll(() => {
  vi.stubGlobal("localStorage", { getItem: () => null });
  vi.stubGlobal("navigator", { language: "en" });
});

describe("translate", () => {
  it("has the same placeholders in both languages", async () => {
    const { translate } = await import("./texts");
    const source = (await import("./texts.ts?raw")).default + (await import("./texts-operations.ts?raw")).default;
    const keys = [...new Set([...source.matchAll(/^ {2}"([\w.-]+)":/gm)].map((found) => found[1] as string))];
    expect(keys.length).toBeGreaterThan(100);
    for (const key of keys) {
      const names = (["en", "uk"] as const).map((one) => [...translate(one, key as never).matchAll(/\{\w+\}/g)].map(String).sort());
      expect(names[0], key).toEqual(names[1]);
    }
  });

  it("fills placeholders", async () => {
    const { translate } = await import("./texts");
    expect(translate("en", "run.steps.of", { done: 2, total: 4 })).toBe("2 of 4 steps");
    expect(translate("uk", "run.steps.of", { done: 2, total: 4 })).toBe("Кроків: 2 з 4");
  });
});
