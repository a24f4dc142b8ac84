/** A typed client of the gateway's HTTP API. The types are generated from its OpenAPI description. */

import type { paths } from "./schema.js";
import { GatewayUnreachable, ProblemError, type ProblemDocument } from "./problem.js";

type Method = "get" | "post" | "patch" | "put" | "delete";
type Operation<P extends keyof paths, M extends Method> = M extends keyof paths[P] ? paths[P][M] : never;
export type PathOf<M extends Method> = {
  [P in keyof paths]: Operation<P, M> extends { responses: unknown } ? P : never;
}[keyof paths];

type Content<R> = R extends { content: { "application/json": infer Body } } ? Body : never;
type Responses<O> = O extends { responses: infer R } ? R : never;
export type Answer<P extends keyof paths, M extends Method> = {
  [S in keyof Responses<Operation<P, M>> & (200 | 201 | 202)]: Content<Responses<Operation<P, M>>[S]>;
}[keyof Responses<Operation<P, M>> & (200 | 201 | 202)];
type Parameters<O> = O extends { parameters: infer P } ? P : never;
type Part<O, Name extends string> = Name extends keyof Parameters<O> ? NonNullable<Parameters<O>[Name]> : never;
type Body<O> = O extends { requestBody?: { content: { "application/json": infer B } } | undefined } ? B : never;

export interface CallOptions<O> {
  path?: Part<O, "path"> extends never ? Record<string, never> : Part<O, "path">;
  query?: Partial<Part<O, "query">>;
  body?: Body<O>;
  /** Decide only about this version: sent as `If-Match`. */
  ifMatch?: string;
  /** Repeat the request safely under this key. Without one, the client makes a key for every change. */
  idempotencyKey?: string;
  signal?: AbortSignal;
}

interface AnyCall {
  path?: object;
  query?: object;
  body?: unknown;
  ifMatch?: string;
  idempotencyKey?: string;
  signal?: AbortSignal;
}

export interface ClientOptions {
  /** Where the gateway is; empty for the origin of the page. */
  baseUrl?: string;
  /** Called for every request, so that a token may be replaced before it expires. */
  token: () => string | null;
  fetch?: typeof fetch;
  timeoutMs?: number;
}

const TIMEOUT_MS = 20_000;

export class TrellisClient {
  readonly #options: ClientOptions;

  constructor(options: ClientOptions) {
    this.#options = options;
  }

  get<P extends PathOf<"get">>(path: P, options: CallOptions<Operation<P, "get">> = {}): Promise<Answer<P, "get">> {
    return this.#call("get", path, options);
  }

  /** A page that is no JSON, such as a runbook in Markdown. */
  async text<P extends PathOf<"get">>(path: P, options: CallOptions<Operation<P, "get">> = {}): Promise<string> {
    return (await this.#answer("get", path, options, "text/*")).text;
  }

  post<P extends PathOf<"post">>(path: P, options: CallOptions<Operation<P, "post">> = {}): Promise<Answer<P, "post">> {
    return this.#call("post", path, options);
  }

  patch<P extends PathOf<"patch">>(
    path: P,
    options: CallOptions<Operation<P, "patch">> = {},
  ): Promise<Answer<P, "patch">> {
    return this.#call("patch", path, options);
  }

  /** The address of a path with its parameters filled in. */
  address(path: string, parts: object = {}, query: object = {}): string {
    return (this.#options.baseUrl ?? "") + addressOf(path, parts, query);
  }

  headers(): Record<string, string> {
    const token = this.#options.token();
    return token === null ? {} : { Authorization: `Bearer ${token}` };
  }

  get fetch(): typeof fetch {
    return this.#options.fetch ?? globalThis.fetch.bind(globalThis);
  }

  async #call<T>(method: Method, path: string, options: AnyCall): Promise<T> {
    return (await this.#answer(method, path, options, "application/json")).document as T;
  }

  async #answer(method: Method, path: string, options: AnyCall, accept: string): Promise<{ text: string; document: unknown }> {
    const headers: Record<string, string> = { Accept: accept, ...this.headers() };
    if (options.body !== undefined) headers["Content-Type"] = "application/json";
    if (options.ifMatch !== undefined) headers["If-Match"] = options.ifMatch;
    if (method !== "get") headers["Idempotency-Key"] = options.idempotencyKey ?? newKey();
    const limit = AbortSignal.timeout(this.#options.timeoutMs ?? TIMEOUT_MS);
    let response: Response;
    let text: string;
    try {
      response = await this.fetch(this.address(path, options.path ?? {}, options.query ?? {}), {
        method: method.toUpperCase(),
        headers,
        body: options.body === undefined ? null : JSON.stringify(options.body),
        signal: options.signal === undefined ? limit : AbortSignal.any([limit, options.signal]),
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
      text = await response.text();
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new GatewayUnreachable("The gateway does not answer.", { cause: error });
    }
    const document = parsed(text);
    if (!response.ok) throw new ProblemError(response.status, (document ?? {}) as ProblemDocument);
    return { text, document };
  }
}

/** A key that nobody made before. `crypto.randomUUID` exists only on HTTPS and on the own machine. */
export function newKey(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (one) => one.toString(16).padStart(2, "0")).join("");
}

export function addressOf(path: string, parts: object, query: object): string {
  const given = parts as Record<string, unknown>;
  const filled = path.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(String(given[name])));
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value === undefined || value === null || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) search.append(name, String(one));
  }
  const text = search.toString();
  return text === "" ? filled : `${filled}?${text}`;
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
