-- Idempotency keys of requests that change existing jobs, each written in the transaction of its change. `about` names what the request
-- was about; `answer` is set where no event of a job shows the answer. Retention removes rows by their age. A limited login has scopes
-- of its own and reads them through functions.
create table request_key (
  scope text collate "C" check (length(scope) <= 500), key text collate "C" check (length(key) <= 200), at timestamptz not null,
  fingerprint bytea not null check (length(fingerprint) <= 64), about text not null check (length(about) <= 200),
  answer bytea check (length(answer) <= 4194304),
  primary key (scope, key)
);
create index request_key_at on request_key (at);
alter table request_key enable row level security;
create policy application on request_key for select to trellis_app using (true);
