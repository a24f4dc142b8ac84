-- A concurrency key whose limit is none: nobody is handed a job of it until it has a limit again. `slots` stays.
ALTER TABLE trellis_concurrency_key ADD COLUMN stopped INTEGER NOT NULL DEFAULT 0 CHECK (stopped IN (0, 1));
