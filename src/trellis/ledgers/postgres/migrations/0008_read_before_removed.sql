-- Before a job is removed it is asked where in the feed its last event stands, and whether every follower has come so far.
create index feed_batch on feed (batch);

-- It is told how long work is kept for followers, and tells what was removed unread.
drop function if exists retain(float8, float8, int);
drop function if exists follow(int, text, float8);
