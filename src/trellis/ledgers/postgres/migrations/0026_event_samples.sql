-- Events of every lifecycle but leased-job (4) and bus-job (5), by type and time: service level objectives count and
-- sample them. A job of the two costs nothing here, because the index leaves them out.
create index event_infrequent_type on event (lifecycle, type, at) where lifecycle not in (4, 5);
