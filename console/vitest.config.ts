import { defineConfig } from "vitest/config";

export default defineConfig({
  resolve: { conditions: ["trellis-source"] },
  ssr: { resolve: { conditions: ["trellis-source", "module", "node"] } },
  test: { include: ["client/src/**/*.test.ts", "app/src/**/*.test.ts"], environment: "node", pool: "threads" },
});
