/** The frame around every screen: navigation, who is signed in, and whether what is shown is current. */

import { useQuery } from "@tanstack/react-query";
import { Link, Outlet, useNavigate } from "@tanstack/react-router";
import { lazy, Suspense, useEffect, useRef, useState } from "react";
import { api } from "./api";
import { Dialog, Toasts, useKeys } from "./components/parts";
import { useTimes } from "./format";
import icon from "./icon.svg";
import { endSession, interval, lastKnown, mode, start } from "./live";
import { language, nextTheme, theme } from "./preferences";
import { SignIn } from "./screens/sign-in";
import { session } from "./session";
import { useStore } from "./store";
import { useTexts, type TextKey } from "./texts";

const SCREENS = [
  { to: "/console/overview", text: "nav.overview", key: "1" },
  { to: "/console/proposals", text: "nav.proposals", key: "2" },
  { to: "/console/runs", text: "nav.runs", key: "3" },
  { to: "/console/jobs", text: "nav.jobs", key: "4" },
  { to: "/console/dead-letters", text: "nav.dead", key: "5" },
  { to: "/console/artifacts", text: "nav.artifacts", key: "6" },
  { to: "/console/agents", text: "nav.agents", key: "7" },
] as const;

/** Screens for operators. The search opens them, too: digits are too few for all. */
const OPERATE = [
  { to: "/console/workers", text: "nav.workers" },
  { to: "/console/schedules", text: "nav.schedules" },
  { to: "/console/alerts", text: "nav.alerts" },
  { to: "/console/events", text: "nav.events" },
  { to: "/console/policy", text: "nav.policy" },
  { to: "/console/authority", text: "nav.authority" },
] as const;

const loadPalette = () => import("./components/palette").then((made) => ({ default: made.Palette }));
const Palette = lazy(loadPalette);

/** Cmd-K or Ctrl-K, also while a field has the focus. */
function useSearchKey(open: () => void): void {
  const latest = useRef(open);
  latest.current = open;
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      if (event.key.toLowerCase() !== "k" || !(event.metaKey || event.ctrlKey) || event.altKey || event.shiftKey) return;
      event.preventDefault();
      latest.current();
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  }, []);
}

export function Frame() {
  const who = useStore(session);
  return (
    <>
      {who === null ? <SignIn /> : <SignedIn key={who.token} />}
      <Toasts />
    </>
  );
}

function SignedIn() {
  const t = useTexts();
  const navigate = useNavigate();
  const [help, setHelp] = useState(false);
  const [searching, search] = useState(false);
  useSearchKey(() => search(true));
  // Loaded ahead, so that what is typed right after the key arrives in its field.
  useEffect(() => void loadPalette(), []);
  const who = useStore(session);
  const shownTheme = useStore(theme);
  const connection = useStore(mode);
  const main = useRef<HTMLElement>(null);
  useEffect(() => start(), []);
  useKeys({
    "?": () => setHelp(true),
    ...Object.fromEntries(SCREENS.map((one) => [one.key, () => void navigate({ to: one.to })])),
  });
  const pending = useQuery({
    queryKey: ["proposals", "pending", "count"],
    queryFn: ({ signal }) => api.get("/proposals", { query: { status: "pending", limit: 200 }, signal }),
    refetchInterval: () => interval(false),
    retry: false,
  });
  const waits = pending.data?.items.length ?? 0;
  const hasMore = pending.data != null && pending.data.next_cursor !== null;
  return (
    <div className="frame">
      <a className="skip" href="#content" onClick={(event) => (event.preventDefault(), main.current?.focus())}>
        {t("nav.skip")}
      </a>
      <header className="side">
        <div className="brand">
          <img src={icon} alt="" />
          Trellis
        </div>
        <button type="button" className="search-button" onClick={() => search(true)}>
          {t("search.title")} <kbd>{/Mac|iPhone|iPad/.test(navigator.userAgent) ? "⌘ K" : "Ctrl K"}</kbd>
        </button>
        <nav aria-label={t("nav.menu")}>
          <ul className="nav">
            {SCREENS.map((one) => (
              <li key={one.to}>
                <Link to={one.to} activeProps={{ "aria-current": "page" }} activeOptions={{ includeSearch: false }}>
                  {t(one.text)}
                  {one.text === "nav.proposals" && waits > 0 && <span className="count">{hasMore ? `${waits}+` : waits}</span>}
                </Link>
              </li>
            ))}
          </ul>
          <div className="nav-group">{t("nav.operate")}</div>
          <ul className="nav">
            {OPERATE.map((one) => (
              <li key={one.to}>
                <Link to={one.to} activeProps={{ "aria-current": "page" }} activeOptions={{ includeSearch: false }}>
                  {t(one.text)}
                </Link>
              </li>
            ))}
          </ul>
        </nav>
        <div className="side-foot">
          <span className="live" role="status">
            <span className={`dot ${connection}`} aria-hidden="true" />
            {connection === "offline" ? <LastKnown text="live.offline" /> : t(`live.${connection}`)}
          </span>
          <button type="button" className="plain" onClick={nextTheme}>
            {t(`theme.${shownTheme}`)}
          </button>
          <button type="button" className="plain" lang={language.value === "en" ? "uk" : "en"} onClick={() => language.set(language.value === "en" ? "uk" : "en")}>
            {t("language.switch")}
          </button>
          <button type="button" className="plain" onClick={() => setHelp(true)}>
            {t("common.keys")} <kbd>?</kbd>
          </button>
          <span className="who">{t("signin.as", { name: who?.name ?? "", roles: who?.roles.join(", ") ?? "" })}</span>
          <button type="button" className="plain" onClick={() => endSession()}>
            {t("signin.out")}
          </button>
        </div>
      </header>
      <main className="main" id="content" ref={main} tabIndex={-1}>
        {connection === "offline" && (
          <p className="banner" role="alert">
            <LastKnown text="live.offline.banner" />
          </p>
        )}
        <Outlet />
      </main>
      {help && <Keys onClose={() => setHelp(false)} />}
      {searching && (
        <Suspense>
          <Palette screens={[...SCREENS, ...OPERATE].map((one) => ({ to: one.to, title: t(one.text) }))} onClose={() => search(false)} />
        </Suspense>
      )}
    </div>
  );
}

/** A text with the time of the last answer. Each answer changes it: a part of its own, so that the frame is not drawn anew. */
function LastKnown({ text }: { text: TextKey }) {
  const { clock } = useTimes();
  return useTexts()(text, { time: clock(useStore(lastKnown)) });
}

function Keys({ onClose }: { onClose: () => void }) {
  const t = useTexts();
  const keys: [string, TextKey][] = [
    ["j k", "keys.move"],
    ["Enter", "keys.open"],
    ["a", "keys.approve"],
    ["r", "keys.reject"],
    ["/", "keys.filter"],
    [SCREENS.map((one) => one.key).join(" "), "keys.go"],
    ["Ctrl/⌘ K", "keys.search"],
    ["?", "keys.help"],
  ];
  return (
    <Dialog title={t("common.keys")} onClose={onClose}>
      <table>
        <tbody>
          {keys.map(([key, what]) => (
            <tr key={key}>
              <td>
                {key.split(" ").map((one) => (
                  <span key={one}>
                    <kbd>{one}</kbd>{" "}
                  </span>
                ))}
              </td>
              <td>{t(what)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <div className="row end">
        <button type="button" data-focus="true" onClick={onClose}>
          {t("common.close")}
        </button>
      </div>
    </Dialog>
  );
}
