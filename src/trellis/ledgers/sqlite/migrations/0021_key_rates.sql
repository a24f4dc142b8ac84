-- Rate limits of concurrency keys (engine/key_rates.py). What types declare: claims a second, how many at once, and how long a token lasts.
ALTER TABLE trellis_type_options ADD COLUMN rate_per_key REAL CHECK (rate_per_key BETWEEN 0.000001 AND 100000);
ALTER TABLE trellis_type_options ADD COLUMN burst_per_key INTEGER CHECK (burst_per_key BETWEEN 1 AND 10000);
ALTER TABLE trellis_type_options ADD COLUMN token_us INTEGER GENERATED ALWAYS AS (
  CAST(1000000.0 / rate_per_key AS INTEGER) + (1000000.0 / rate_per_key > CAST(1000000.0 / rate_per_key AS INTEGER))) VIRTUAL;
CREATE INDEX trellis_type_options_rated ON trellis_type_options (lifecycle, name) WHERE rate_per_key IS NOT NULL;

-- How far the claims of a type have used the rate of each key.
CREATE TABLE trellis_key_rate (
  key INTEGER NOT NULL, type INTEGER NOT NULL, used_until INTEGER NOT NULL, PRIMARY KEY (key, type)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER trellis_key_takes_its_rates_along AFTER DELETE ON trellis_concurrency_key BEGIN
  DELETE FROM trellis_key_rate WHERE key = old.id;
END;

-- When a key whose jobs wait for a token is looked at again, and the first waiting job of each type of a key.
ALTER TABLE trellis_concurrency_key ADD COLUMN due_at INTEGER;
CREATE INDEX trellis_concurrency_key_due ON trellis_concurrency_key (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX trellis_job_parked_type ON trellis_job (ckey, type, prio, pos) WHERE place = 3;

-- Taking a lease takes a token. A history that is put back takes none: its claims were made before.
CREATE TRIGGER trellis_lease_takes_a_token AFTER UPDATE OF place ON trellis_job
WHEN new.place = 4 AND old.place <> 4 AND new.ckey IS NOT NULL
  AND EXISTS (SELECT 1 FROM trellis_type_options INDEXED BY trellis_type_options_rated WHERE rate_per_key IS NOT NULL)
  AND NOT EXISTS (SELECT 1 FROM trellis_restoring WHERE job = new.id)
BEGIN
  SELECT raise(ABORT, 'trellis: the rate of the concurrency key allows no claim now')
  FROM trellis_job_type t JOIN trellis_type_options o ON o.lifecycle = t.lifecycle AND o.name = t.name
  LEFT JOIN trellis_key_rate k ON k.key = new.ckey AND k.type = t.id
  WHERE t.id = new.type AND max(coalesce(k.used_until, 0), new.until - new.length) + o.token_us
    > new.until - new.length + o.burst_per_key * o.token_us;
  INSERT INTO trellis_key_rate (key, type, used_until) SELECT new.ckey, t.id, new.until - new.length + o.token_us
  FROM trellis_job_type t JOIN trellis_type_options o ON o.lifecycle = t.lifecycle AND o.name = t.name
  WHERE t.id = new.type AND o.token_us IS NOT NULL
  ON CONFLICT (key, type) DO UPDATE
    SET used_until = excluded.used_until + max(0, used_until - new.until + new.length);
END;
