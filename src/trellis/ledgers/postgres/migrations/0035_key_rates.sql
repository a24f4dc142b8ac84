-- Rate limits of concurrency keys (engine/key_rates.py). What types declare: claims a second, how many at once, and how long a token lasts.
alter table type_options
  add column rate_per_key float8 check (rate_per_key between 0.000001 and 100000),
  add column burst_per_key int check (burst_per_key between 1 and 10000),
  add column token_us bigint generated always as (ceil(1000000 / rate_per_key)::bigint) stored,
  add constraint type_options_rate check ((rate_per_key is null) = (burst_per_key is null));
create index type_options_rated on type_options (lifecycle, type) where rate_per_key is not null;

-- How far the claims of a type have used the rate of each key. Only claims write here: whoever gives tokens to waiting jobs reads it, and
-- locks the key.
create table key_rate (ckey bigint, lifecycle smallint, type int, used_until timestamptz not null, primary key (ckey, type, lifecycle))
  with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
alter table key_rate enable row level security;
create policy application on key_rate for select to trellis_app using (true);
create policy own on key_rate for select using ((select reads_all()) or exists (select from job j where j.ckey = key_rate.ckey));

-- When a key whose jobs wait for a token is looked at again, and the first waiting job of each type of a key.
alter table concurrency_key add column due_at timestamptz;
create index concurrency_key_due on concurrency_key (due_at) where due_at is not null;
create index parked_type on parked (ckey, type, lifecycle, prio, pos);
