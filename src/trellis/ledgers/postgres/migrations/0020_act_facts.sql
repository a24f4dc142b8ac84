-- An act names the job that it follows from, if one does, and says what else its audit record shows (JSON, byte for byte).
alter table act add column job_id text collate "C";
alter table act add column facts text;

-- From this version on these functions take the reason of an act, or more about it, as further arguments that may be left out.
drop function if exists _record_act(int, smallint, text, text, text, text, text, text);
drop function if exists record_act(int, text, text, text, text, text, text);
drop function if exists set_paused(int, text, boolean);
drop function if exists set_rate(int, text, float8, int);
drop function if exists set_held_max(int, text, int);
drop function if exists set_key_limit(int, text, int);
drop function if exists leave_behind(int, text);
