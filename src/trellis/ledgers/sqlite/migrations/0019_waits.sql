-- Taken by the tables of waiting jobs.
SELECT 1;
