import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// The gateway serves what is built, so the build writes into its package. Nothing is inlined into the page: its content
// security policy forbids inline scripts and styles, and small files as data: addresses would gain nothing.
export default defineConfig({
  plugins: [react()],
  resolve: { conditions: ["trellis-source", "module", "browser"] },
  build: {
    outDir: "../../src/trellis/gateway/console_files",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
  },
});
