-- What applications declare about their job types: it holds for every submit that does not choose an option by name.
CREATE TABLE trellis_type_options (
  lifecycle INTEGER NOT NULL, name TEXT NOT NULL,
  prio INTEGER NOT NULL, max_attempts INTEGER NOT NULL CHECK (max_attempts >= 1), max_deaths INTEGER NOT NULL CHECK (max_deaths >= 0),
  deadline_s REAL, concurrency_limit INTEGER NOT NULL CHECK (concurrency_limit >= 1),
  keyed INTEGER NOT NULL CHECK (keyed IN (0, 1)),   -- a function of the application computes each job's concurrency key
  compensation TEXT, changed_by INTEGER NOT NULL, changed_at INTEGER NOT NULL,
  PRIMARY KEY (lifecycle, name)
) STRICT, WITHOUT ROWID;
