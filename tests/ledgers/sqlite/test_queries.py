"""SQL by name: a file and the class that reads it must agree when they are imported."""

from typing import LiteralString

import pytest

from trellis.ledgers.queries import NamedQueries, QueryFileError, parse
from trellis.ledgers.sqlite.schema import SCHEMA_VERSION, migrations

FILE = "trellis.ledgers.sqlite:queries/migrate.sql"


def test_a_query_that_is_missing_is_found_at_import():
    with pytest.raises(QueryFileError, match="missing \\['nobody_wrote_this'\\]"):

        class Wrong(NamedQueries, file=FILE):
            has_meta: LiteralString
            read_version: LiteralString
            write_version: LiteralString
            nobody_wrote_this: LiteralString


def test_a_query_nobody_asks_for_is_found_at_import():
    with pytest.raises(QueryFileError, match="not asked for \\['read_version', 'write_version'\\]"):

        class Wrong(NamedQueries, file=FILE):
            has_meta: LiteralString
            nothing_is_restored: LiteralString
            nobody_restores: LiteralString


def test_a_file_is_split_by_name_without_its_comments():
    text = "-- header\n\n-- name: one\nSELECT 1;\n\n-- about two\n-- name: two\nSELECT\n  2;\n"
    assert parse(text, "x") == {"one": "SELECT 1", "two": "SELECT\n  2"}


def test_a_name_used_twice_is_refused():
    with pytest.raises(QueryFileError, match="twice"):
        parse("-- name: one\nSELECT 1;\n-- name: one\nSELECT 2;\n", "x")


def test_migrations_are_numbered_from_one():
    assert sorted(migrations()) == list(range(1, SCHEMA_VERSION + 1))
