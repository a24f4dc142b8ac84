"""SQL by name: the code uses exactly the queries that the files hold."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import trellis
from trellis.ledgers.queries import NamedQueries, QueryFileError, parse
from trellis.ledgers.sqlite.schema import SCHEMA_VERSION, migrations

SOURCE = Path(trellis.__file__).parent


def query_files(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The constants of a module that are `NamedQueries("package:file")`, with their files."""
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="NamedQueries"), args=[ast.Constant(value=str(file))]),
            ):
                yield name, file


def test_code_uses_exactly_the_queries_of_each_file():
    texts = {path: path.read_text() for path in SOURCE.rglob("*.py")}
    trees = {path: ast.parse(text) for path, text in texts.items() if "_QUERIES" in text}
    files = {(path, name): file for path, tree in trees.items() for name, file in query_files(tree)}
    owners = {name: path for path, name in files if not name.startswith("_")}
    used: dict[str, set[str]] = {file: set() for file in files.values()}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=query) if name.endswith("_QUERIES"):
                    used[files[path if (path, name) in files else owners[name], name]].add(query)
    stored = {file: set(vars(NamedQueries(file))) - {"_file"} for file in used}
    assert used == stored
    assert len(files) >= 20


def test_query_that_its_file_does_not_have_is_refused_with_the_file():
    file = "trellis.ledgers.sqlite:queries/migrate.sql"
    with pytest.raises(AttributeError, match=f"{file} has no query missing"):
        _ = NamedQueries(file).missing


def test_a_file_is_split_by_name_without_its_comments():
    text = "-- header\n\n-- name: one\nSELECT 1;\n\n-- about two\n-- name: two\nSELECT\n  2;\n"
    assert parse(text, "x") == {"one": "SELECT 1", "two": "SELECT\n  2"}


def test_a_part_stands_in_every_query_that_names_it():
    parts = "-- part: both\na, {column}\n\n-- about it\n-- part: column\nb\n\n"
    queries = "-- name: one\nSELECT {both};\n-- name: two\nSELECT {column}, '{}', {elsewhere};\n"
    assert parse(parts + queries, "x") == {"one": "SELECT a, b", "two": "SELECT b, '{}', {elsewhere}"}


def test_no_part_is_without_a_query():
    texts = [path.read_text() for path in SOURCE.rglob("*.sql")]
    parts = [(name, text) for text in texts for name in re.findall(r"^-- part: (\w+)", text, re.MULTILINE)]
    assert parts
    assert [name for name, text in parts if f"{{{name}}}" not in text] == []


def test_a_name_used_twice_is_refused():
    with pytest.raises(QueryFileError, match="twice"):
        parse("-- name: one\nSELECT 1;\n-- name: one\nSELECT 2;\n", "x")


def test_migrations_are_numbered_from_one():
    assert sorted(migrations()) == list(range(1, SCHEMA_VERSION + 1))
