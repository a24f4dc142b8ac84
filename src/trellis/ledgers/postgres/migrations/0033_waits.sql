-- Taken by the tables of waiting jobs.
select 1;
