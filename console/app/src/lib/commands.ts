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

export function commands(options: {
  trellis: (string | null | undefined)[];
  method?: string;
  address: string;
  body?: unknown;
  headers?: Record<string, string>;
  python?: string;
  /** The command asks no gateway, and has no option for one. */
  isLocal?: boolean;
  /** The address of the gateway, if it is not the one that serves this page. */
  gateway?: string;
}): Commands {
  const gateway = options.gateway ?? location.origin;
  const method = options.method ?? "GET";
  const words = ["curl -sS", method === "GET" ? null : `-X ${method}`, AUTHORIZED];
  for (const [name, value] of Object.entries(options.headers ?? {})) words.push(`-H ${shellWord(`${name}: ${value}`)}`);
  if (options.body !== undefined) {
    words.push("-H 'Content-Type: application/json'", `-d ${shellWord(JSON.stringify(options.body))}`);
  }
  words.push(shellWord(gateway + options.address));
  const command = [...options.trellis, ...(options.isLocal === true ? [] : ["--gateway", gateway])];
  return {
    trellis: ["trellis", ...command.filter((one) => one != null).map((one) => shellWord(one))].join(" "),
    curl: words.filter((one) => one !== null).join(" "),
    python: options.python === undefined ? null : pythonProgram(gateway, options.python),
  };
}

function pythonProgram(gateway: string, statement: string): string {
  const open = `with connect_sync(${pythonLiteral(gateway)}) as client:`;
  return ["from trellis import connect_sync", "", open, `    ${statement}`].join("\n");
}
