import { defineConfig } from "vitest/config";

export default defineConfig({
  resolve: { conditions: ["source"] },
  test: { include: ["client/src/**/*.test.ts", "app/src/**/*.test.ts"], environment: "node", pool: "threads" },
});
