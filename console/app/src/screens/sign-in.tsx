/** Sign-in with a token. A link with a one-time code signs in before this page is shown. */

import { useId, useState } from "react";
import { Command } from "../components/parts";
import icon from "../icon.svg";
import { language } from "../preferences";
import { endedBecause, signIn } from "../session";
import { useStore } from "../store";
import { useTexts } from "../texts";

export function SignIn() {
  const t = useTexts();
  const why = useStore(endedBecause);
  const [token, setToken] = useState("");
  const [isMalformed, setMalformed] = useState(false);
  const field = useId();
  return (
    <main className="signin">
      <div className="brand">
        <img src={icon} alt="" />
        Trellis
      </div>
      <p />
      <form className="card" onSubmit={(event) => (event.preventDefault(), setMalformed(!signIn(token)))}>
        <h1>{t("signin.title")}</h1>
        <p />
        {why !== null && (
          <p className="banner" role="alert">
            {why}
          </p>
        )}
        <label htmlFor={field}>{t("signin.token")}</label>
        <input
          id={field}
          type="password"
          autoComplete="off"
          spellCheck={false}
          autoFocus
          value={token}
          onChange={(event) => (setToken(event.target.value), setMalformed(false))}
        />
        {isMalformed && (
          <p className="banner bad" role="alert">
            {t("signin.malformed")}
          </p>
        )}
        <div className="row">
          <button type="submit" className="primary">
            {t("signin.button")}
          </button>
          <button type="button" onClick={() => language.set(language.value === "en" ? "uk" : "en")}>
            {t("language.switch")}
          </button>
        </div>
        <p />
        <p className="quiet">{t("signin.hint")}</p>
        <Command text="trellis token issue --role owner,control-plane" />
        <p />
        <p className="quiet">{t("signin.link")}</p>
      </form>
    </main>
  );
}
