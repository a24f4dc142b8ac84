-- A round of an evaluator says when it is out of date: observe_alerts takes one more argument and stores the time in `meta`. The function
-- without it stays for older programs (functions/99_older_programs.sql).
do $$ begin end $$;
