-- A concurrency key whose limit is none: nobody is handed a job of it until it has a limit again.
alter table concurrency_key
  drop constraint concurrency_key_cap_check, add constraint concurrency_key_cap_check check (cap >= 0);
