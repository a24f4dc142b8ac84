-- The program calls `feed_places` from this version on. Functions are written anew by every migration; this number lets a database that
-- does not have it yet say so.
comment on table feed is 'One place for each transaction that appended events. Followers keep the last place that they have read.';
