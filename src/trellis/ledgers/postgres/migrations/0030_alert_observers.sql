-- Who saw an alert last; when an evaluator could not read its condition last; and the channels (job types) through which its beginning was
-- reported and its end was not yet.
alter table alert add column seen_by int, add column unread_at timestamptz, add column report_types text[] not null default '{}';
create index alert_unreported on alert (resolved_at) where resolved_at is not null and report_types <> '{}';
