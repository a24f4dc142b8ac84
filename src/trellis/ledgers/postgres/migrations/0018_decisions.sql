-- What happens to a job by itself, for every state, occasion and set of facts: the answers of engine/decide.py, loaded at every migration.
create table decision (
  lifecycle smallint, state smallint, occasion text collate "C", facts smallint, trigger text collate "C", cause text collate "C",
  reason_code text collate "C", stage text collate "C", counts_death boolean not null, spares_attempt boolean not null,
  primary key (lifecycle, state, occasion, facts)
);
-- Functions whose arguments changed.
drop function if exists _require(smallint, text, text[]);
drop function if exists _if_buried(transition, text);
drop function if exists _stage_of(transition);
