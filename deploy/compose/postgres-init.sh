#!/bin/sh
# Run once by PostgreSQL's image, when it makes its data folder: the two databases, and the login of every role of Trellis.
# `trellis migrate` makes the tables, and gives the login's group what it may do.
set -eu
psql -v ON_ERROR_STOP=1 -v password="$TRELLIS_DB_PASSWORD" --username "${POSTGRES_USER:-postgres}" --dbname postgres <<'END'
create database trellis;
create database trellis_nlm;
create role trellis_app nologin;
create role trellis login password :'password' in role trellis_app;
END
