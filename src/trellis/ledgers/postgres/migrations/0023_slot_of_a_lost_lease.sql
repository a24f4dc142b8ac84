-- A job whose lease is lost gives its slot to the most urgent job of its key (`_reap`). Only functions changed, and every
-- migration loads them again.
do $$ begin end $$;
