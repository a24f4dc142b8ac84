/** The screens and their addresses. What an address says after `?` is checked: it may come from anywhere. */

import { createRootRoute, createRoute, createRouter, lazyRouteComponent, Link, redirect } from "@tanstack/react-router";
import { Frame } from "./frame";
import { AGENT_PARTS, type AgentPart } from "./lib/agents";
import { TEXT_MAX } from "./lib/filter";
import { DeadLetters } from "./screens/dead-letters";
import { Job, Jobs } from "./screens/jobs";
import { Overview } from "./screens/overview";
import { Proposals, STATUSES, type ProposalStatus } from "./screens/proposals";
import { Run } from "./screens/run";
import { Runs } from "./screens/runs";
import { useTexts } from "./texts";

const ID_CHARS_MAX = 250;

const root = createRootRoute({ component: Frame, notFoundComponent: NotFound });
const home = createRoute({
  getParentRoute: () => root,
  path: "/",
  beforeLoad: () => {
    throw redirect({ to: "/console/overview", replace: true });
  },
});
const filtered = (search: Record<string, unknown>): { q?: string } =>
  typeof search["q"] === "string" && search["q"] !== "" ? { q: search["q"].slice(0, TEXT_MAX) } : {};

const overview = createRoute({ getParentRoute: () => root, path: "/console/overview", component: Overview });
const proposals = createRoute({
  getParentRoute: () => root,
  path: "/console/proposals",
  component: Proposals,
  validateSearch: (search: Record<string, unknown>): { status?: ProposalStatus; id?: string } => {
    const status = STATUSES.find((one) => one === search["status"]);
    const id = typeof search["id"] === "string" ? search["id"].slice(0, ID_CHARS_MAX) : undefined;
    return { ...(status === undefined ? {} : { status }), ...(id === undefined ? {} : { id }) };
  },
});
const runs = createRoute({ getParentRoute: () => root, path: "/console/runs", component: Runs, validateSearch: filtered });
const run = createRoute({ getParentRoute: () => root, path: "/console/runs/$runId", component: Run });
const jobs = createRoute({ getParentRoute: () => root, path: "/console/jobs", component: Jobs, validateSearch: filtered });
const job = createRoute({ getParentRoute: () => root, path: "/console/jobs/$jobId", component: Job });
const dead = createRoute({
  getParentRoute: () => root,
  path: "/console/dead-letters",
  component: DeadLetters,
  validateSearch: filtered,
});

const artifacts = createRoute({
  getParentRoute: () => root,
  path: "/console/artifacts",
  component: lazyRouteComponent(() => import("./screens/artifacts"), "Artifacts"),
  validateSearch: filtered,
});
const artifact = createRoute({
  getParentRoute: () => root,
  path: "/console/artifacts/$artifactId",
  component: lazyRouteComponent(() => import("./screens/artifacts"), "ArtifactPage"),
  validateSearch: (search: Record<string, unknown>): { with?: string } =>
    typeof search["with"] === "string" && search["with"] !== "" ? { with: search["with"].slice(0, ID_CHARS_MAX) } : {},
});
const agents = createRoute({
  getParentRoute: () => root,
  path: "/console/agents",
  component: lazyRouteComponent(() => import("./screens/agents"), "Agents"),
});
const agent = createRoute({
  getParentRoute: () => root,
  path: "/console/agents/$slug",
  component: lazyRouteComponent(() => import("./screens/agents"), "AgentPage"),
  validateSearch: (search: Record<string, unknown>): { part?: AgentPart } => {
    const part = AGENT_PARTS.find((one) => one === search["part"]);
    return part === undefined ? {} : { part };
  },
});

/** The value of a parameter of an address, if it is a text of sensible length. */
const worded = <K extends string>(...names: K[]) => (search: Record<string, unknown>): { [name in K]?: string } =>
  Object.fromEntries(names.flatMap((name) => (typeof search[name] === "string" && search[name] !== "" ? [[name, search[name].slice(0, ID_CHARS_MAX)]] : []))) as { [name in K]?: string };

// The screens for operators are loaded when they are opened.
const workers = createRoute({
  getParentRoute: () => root,
  path: "/console/workers",
  component: lazyRouteComponent(() => import("./screens/workers"), "Workers"),
});
const schedules = createRoute({
  getParentRoute: () => root,
  path: "/console/schedules",
  component: lazyRouteComponent(() => import("./screens/schedules"), "Schedules"),
  validateSearch: worded("name"),
});
const alerts = createRoute({
  getParentRoute: () => root,
  path: "/console/alerts",
  component: lazyRouteComponent(() => import("./screens/alerts"), "Alerts"),
  validateSearch: worded("runbook"),
});
const policy = createRoute({
  getParentRoute: () => root,
  path: "/console/policy",
  component: lazyRouteComponent(() => import("./screens/policy"), "Policy"),
  validateSearch: worded("topic"),
});
const authority = createRoute({
  getParentRoute: () => root,
  path: "/console/authority",
  component: lazyRouteComponent(() => import("./screens/authority"), "Authority"),
  validateSearch: worded("rule", "role"),
});
const events = createRoute({
  getParentRoute: () => root,
  path: "/console/events",
  component: lazyRouteComponent(() => import("./screens/events"), "EventsScreen"),
  validateSearch: worded("type", "correlation", "lifecycle", "since"),
});
const operations = [workers, schedules, alerts, policy, authority, events] as const;

export const router = createRouter({
  routeTree: root.addChildren([home, overview, proposals, runs, run, jobs, job, dead, artifacts, artifact, agents, agent, ...operations]),
  defaultPreload: false,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}

function NotFound() {
  const t = useTexts();
  return (
    <div className="empty">
      <h1>{t("common.notfound")}</h1>
      <p />
      <Link className="button" to="/console/overview">
        {t("common.home")}
      </Link>
    </div>
  );
}
