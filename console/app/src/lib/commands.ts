/**
 * The same act as a command of `trellis`, as curl, and in Python. Each names the gateway that serves this console: a
 * copied command without it would act on whatever ledger the person's settings name.
 */

export interface Commands {
  trellis: string;
  curl: string;
  /** Null where the Python client has no such call. */
  python: string | null;
}

const AUTHORIZED = '-H "Authorization: Bearer $TRELLIS_TOKEN"';

/** A word of a shell command: quoted unless it is harmless. */
export function shellWord(text: string): string {
  return /^[A-Za-z0-9_@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** A literal of Python; JSON text is one, apart from its three constants. */
export function pythonLiteral(value: unknown): string {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(pythonLiteral).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value)
      .map(([name, one]) => `${JSON.stringify(name)}: ${pythonLiteral(one)}`)
      .join(", ")}}`;
  }
  return JSON.stringify(value);
}

/** Commands that work on this machine or on a ledger, and have no option for a gateway. */
export const LOCAL: ReadonlySet<string> = new Set([
  ...["audit", "backup", "completion", "demo", "doctor", "followers", "init", "lifecycles", "migrate", "move", "health", "rebuild"],
  ...["restore", "retention", "sweep", "token", "up", "verify", "version", "worker"],
  ...["agents create", "alerts runbook", "memory export", "memory import", "policy check"],
]);

/** A command to type, at the gateway that serves this page if the command can ask one. */
export function typed(command: string, gateway: string = location.origin): string {
  const [program, first = "", second = ""] = command.split(" ");
  if (program !== "trellis" || LOCAL.has(first) || LOCAL.has(`${first} ${second}`) || command.includes("--gateway")) return command;
  return `${command} --gateway ${shellWord(gateway)}`;
}

/** Arguments of a call in Python, without those that have no value. */
export function pythonArguments(named: Record<string, unknown>): string {
  return Object.entries(named)
    .filter(([, value]) => value !== undefined && value !== null)
    .map(([name, value]) => `${name}=${pythonLiteral(value)}`)
    .join(", ");
}

/** Options of a command, without those that have no value. */
export function optionsOf(named: Record<string, string | number | null | undefined>): string[] {
  return Object.entries(named).flatMap(([name, value]) => (value === undefined || value === null || value === "" ? [] : [`--${name}`, String(value)]));
}

export function commands(options: {
  trellis: (string | null | undefined)[];
  method?: string;
  address: string;
  body?: unknown;
  /** Bodies of several requests, where the gateway takes no more at once. */
  bodies?: unknown[];
  headers?: Record<string, string>;
  python?: string;
  /** The command asks no gateway, and has no option for one. */
  isLocal?: boolean;
  /** The address of the gateway, if it is not the one that serves this page. */
  gateway?: string;
}): Commands {
  const gateway = options.gateway ?? location.origin;
  const method = options.method ?? "GET";
  const curl = (body: unknown) => {
    const words = ["curl -sS", ...(method === "GET" ? [] : [`-X ${method}`]), AUTHORIZED];
    for (const [name, value] of Object.entries(options.headers ?? {})) words.push(`-H ${shellWord(`${name}: ${value}`)}`);
    if (body !== undefined) words.push("-H 'Content-Type: application/json'", `-d ${shellWord(JSON.stringify(body))}`);
    return [...words, shellWord(gateway + options.address)].join(" ");
  };
  const command = [...options.trellis, ...(options.isLocal === true ? [] : ["--gateway", gateway])];
  return {
    trellis: ["trellis", ...command.filter((one) => one != null).map((one) => shellWord(one))].join(" "),
    curl: (options.bodies ?? [options.body]).map(curl).join("\n"),
    python: options.python === undefined ? null : pythonProgram(gateway, options.python),
  };
}

function pythonProgram(gateway: string, statement: string): string {
  const open = `with connect_sync(${pythonLiteral(gateway)}) as client:`;
  return ["from trellis import connect_sync", "", open, ...statement.split("\n").map((line) => (line === "" ? "" : `    ${line}`))].join("\n");
}
