-- The verbs store the key of a request themselves, in the transaction of their change, and take it as one more argument. The functions
-- without it stay for older programs (functions/99_older_programs.sql).
do $$ begin end $$;
