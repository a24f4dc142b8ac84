-- Events of every lifecycle but leased-job (4) and bus-job (5), of which there are few, by the transaction that wrote
-- them: who follows only those does not read through all the others. A job of the two costs nothing here, because the
-- index leaves them out.
create index event_infrequent on event (batch) where lifecycle not in (4, 5);
