-- The functions of this version look before a claim's marks themselves, which the program did before, and write who had asked a holder
-- to stop into the event of a job that ended otherwise.
comment on table wish is 'Who asked the holder of a job to stop, when and why. A row counts for the lease of its epoch.';
