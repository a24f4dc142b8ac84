import { QueryClientProvider } from "@tanstack/react-query";
import { RouterProvider } from "@tanstack/react-router";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { api } from "./api";
import { queries } from "./live";
import { applyPreferences } from "./preferences";
import { router } from "./router";
import { endedBecause, restore, signIn, takeCode } from "./session";
import "./styles.css";
import "./styles-operations.css";

applyPreferences();
restore();
const code = takeCode();
if (code !== null) {
  try {
    signIn((await api.post("/sign-in", { body: { code } })).token);
  } catch (error) {
    endedBecause.set(error instanceof Error ? error.message : String(error));
  }
}

const root = document.getElementById("root");
if (root !== null) {
  createRoot(root).render(
    <StrictMode>
      <QueryClientProvider client={queries}>
        <RouterProvider router={router} />
      </QueryClientProvider>
    </StrictMode>,
  );
}
