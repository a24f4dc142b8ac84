-- A subscriber of the feed stores the position at which it begins with its subscription: follow takes one more argument. The function
-- without it stays for older programs (functions/99_older_programs.sql).
do $$ begin end $$;
