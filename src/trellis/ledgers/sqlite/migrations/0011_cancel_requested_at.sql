-- When a soft cancel was asked for: the event of a job that ends otherwise says who asked, when and why. NULL in older rows.
ALTER TABLE trellis_wish ADD COLUMN at INTEGER;
