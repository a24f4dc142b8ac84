-- An operator may discard a staged artifact. The lifecycles say so, and are loaded with every new schema version; nothing else changes.
select 1;
