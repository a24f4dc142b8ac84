-- Idempotency keys of requests that change existing jobs, each written in the transaction of its change. `about` names what the request
-- was about; `answer` is set where no event of a job shows the answer. Retention removes rows by their age.
CREATE TABLE trellis_request_key (
  scope TEXT NOT NULL CHECK (length(scope) <= 500), key TEXT NOT NULL CHECK (length(key) <= 200), at INTEGER NOT NULL,
  fingerprint BLOB NOT NULL CHECK (length(fingerprint) <= 64), about TEXT NOT NULL CHECK (length(about) <= 200),
  answer BLOB CHECK (length(answer) <= 4194304),
  PRIMARY KEY (scope, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX trellis_request_key_age ON trellis_request_key (at);
