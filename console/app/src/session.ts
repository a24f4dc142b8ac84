/** Who is signed in. The token is kept in memory and in the storage of this tab, which ends with the tab. */

import { Store } from "./store";

export interface Session {
  token: string;
  name: string;
  roles: string[];
  /** Milliseconds since the epoch. */
  expiresAt: number | null;
}

const KEY = "trellis.token";
const TOKEN_CHARS_MAX = 8_192;

export const session = new Store<Session | null>(null);
/** Why the last session ended; shown on the sign-in page. */
export const endedBecause = new Store<string | null>(null);

export function restore(): void {
  const kept = sessionStorage.getItem(KEY);
  if (kept !== null) session.set(read(kept));
}

/** Returns whether the text looks like a token. Whether the gateway takes it, the first request shows. */
export function signIn(text: string): boolean {
  const made = read(text.trim().replace(/^Bearer\s+/i, ""));
  if (made === null) return false;
  sessionStorage.setItem(KEY, made.token);
  endedBecause.set(null);
  session.set(made);
  return true;
}

export function signOut(reason: string | null = null): void {
  sessionStorage.removeItem(KEY);
  endedBecause.set(reason);
  session.set(null);
}

/** The claims are only shown: the gateway verifies the token at every request. */
function read(token: string): Session | null {
  const parts = token.split(".");
  if (token.length > TOKEN_CHARS_MAX || parts.length !== 3) return null;
  try {
    const bytes = Uint8Array.from(atob((parts[1] ?? "").replaceAll("-", "+").replaceAll("_", "/")), (one) => one.charCodeAt(0));
    const claims = JSON.parse(new TextDecoder().decode(bytes)) as { sub?: unknown; role?: unknown; exp?: unknown };
    const roles = Array.isArray(claims.role) ? claims.role.map(String) : claims.role === undefined ? [] : [String(claims.role)];
    return {
      token,
      name: String(claims.sub ?? "?"),
      roles,
      expiresAt: typeof claims.exp === "number" ? claims.exp * 1_000 : null,
    };
  } catch {
    return null;
  }
}

/** The code of a sign-in link, taken out of the address so that it stays in no history. */
export function takeCode(): string | null {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (code !== null) history.replaceState(null, "", location.pathname + location.search);
  return code;
}
