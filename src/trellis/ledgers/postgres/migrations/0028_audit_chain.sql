-- The newest block of the audit chain, whose blocks are objects of the object store. One row: it is replaced only by the block after it.
-- An act is `sealed` when a block has its audit record.
create table audit_head (
  one boolean primary key default true check (one), number bigint not null check (number >= 0),
  sha256 text not null check (length(sha256) = 64), place text, feed int not null check (feed >= 1), at timestamptz not null
);
alter table audit_head enable row level security;
create policy application on audit_head for select to trellis_app using (true);
create policy own on audit_head for select using ((select reads_all()));
alter table act add column sealed boolean not null default false;
create index act_unsealed on act (no) where not sealed;
