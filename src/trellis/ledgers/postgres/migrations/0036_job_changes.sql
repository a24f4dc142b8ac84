-- Discarded jobs, delays that operators end, and priorities that they change. The lifecycles say so, and are loaded with every new schema
-- version; nothing else changes.
select 1;
