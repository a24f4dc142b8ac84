/** A refusal of the gateway (RFC 9457), or a gateway that does not answer. */

export interface ProblemDocument {
  type?: string;
  title?: string;
  status?: number;
  detail?: string;
  code?: string;
  correlation_id?: string | null;
  [name: string]: unknown;
}

export class ProblemError extends Error {
  override readonly name = "ProblemError";
  readonly status: number;
  readonly code: string;
  readonly detail: string;
  readonly correlationId: string | null;
  readonly document: ProblemDocument;

  constructor(status: number, document: ProblemDocument) {
    super(document.detail ?? document.title ?? `HTTP ${status}`);
    this.status = status;
    this.code = document.code ?? "UNKNOWN";
    this.detail = this.message;
    this.correlationId = document.correlation_id ?? null;
    this.document = document;
  }
}

/** Nothing answered: no network, no gateway, or an answer that broke off. */
export class GatewayUnreachable extends Error {
  override readonly name = "GatewayUnreachable";
}
