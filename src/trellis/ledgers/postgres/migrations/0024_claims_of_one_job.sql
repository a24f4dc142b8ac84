-- A claim may name the only job that it takes: turn, _claim and _pick take one more argument. The functions without it stay, because calls
-- of older programs that wait for this migration go on in them (functions/99_older_programs.sql).
do $$ begin end $$;
