-- The lifecycle inbox-entry. The lifecycles themselves are loaded after every migration; the number makes sure that one happens
-- before a program that knows this lifecycle uses a database that does not.
select 1;
