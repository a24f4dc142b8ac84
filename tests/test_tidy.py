"""The habits of this code that a machine can check. Each rule names what to do instead when it fails."""

import ast
import gc
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # so one process parses the code for all of these rules

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "trellis"
TESTS = ROOT / "tests"

MODULE_LINES_MAX = 800
FUNCTION_LINES_MAX = 60
PARTICIPLES = {"asked", "found", "heard", "made", "mine", "said", "told"}

# Where catching everything is the point. Path under src/trellis -> why.
BROAD_EXCEPT_ALLOWED: dict[str, str] = {
    "engine/service.py": "the service loop: one bad pass is logged and tried again",
    "worker/runners.py": "whatever user code raises is the outcome of its job",
    "engine/metrics.py": "the call is committed: whatever counting it raises is told in the log",
    "engine/batches.py": "a batch that breaks must tell every caller that waits for it",
    "ledgers/postgres/connection.py": "closes what a failed opening opened, then raises",
    "ledgers/postgres/ledger.py": "closes what a failed opening opened, then raises",
    "ledgers/sqlite/lanes.py": "a batch that breaks must tell every caller that waits for it",
    "ledgers/sqlite/ledger.py": "closes what a failed opening opened, then raises",
    "ledgers/sqlite/schema.py": "rolls back, then raises",
    "bus/scheduling/scheduler.py": "whatever a safety kernel raises is no permission: the job waits, and the others go on",
    "bus/wire/connection.py": "whatever a server makes the client library raise, the next try may find another one there",
    "bus/port.py": "whatever a handler raises is the loss of its own packet only",
    "engine/tracing.py": "whatever the tracing library raises is told in the log, and the work goes on",
    "runs/temporal/driver.py": "whatever a step raises ends its drive as in the built-in driver, not only its activity",
    "engine/lease_runner.py": "one run must not end the process that drives the others",
    "engine/step_runner.py": "whatever a step raises is its failure; the lifecycle's table says what follows",
    "proposals/apply.py": "whatever one proposal raises is told in it, and the others go on",
    "worker/handlers.py": "whatever an error hook raises is told in the log, and the outcome stays",
    "worker/middleware.py": "whatever user code raises is the outcome of its job",
    "worker/payloads.py": "whatever the application's serializer raises says that the value does not fit",
    "worker/process_child.py": "whatever user code raises is the outcome of its job",
    "worker/resources.py": "whatever a resource raises stops the start, or is told in the log when it is closed",
    "worker/durable.py": "whatever a step raises is the outcome of the step",
    "worker/threads.py": "whatever user code raises is the outcome of its job",
    "worker/app.py": "whatever the application's key function raises is named in the refusal of the submit",
    "http_server/application.py": "whatever a route raises goes to the handlers that answer errors",
    "integrations/sql.py": "whatever a driver raises is looked at: a refusal by the ledger is translated, the rest is raised",
    "cli/metrics_export.py": "whatever the exporter raises is told in the log, and the process goes on",
    "cli/applications.py": "importing the user's module may raise anything",
}

# Parts that must behave the same on every run: time, ids and randomness are arguments there.
DETERMINISTIC_PARTS = ("lifecycles", "engine", "ledgers", "worker")
# (path under src/trellis, call) -> why this one may look at the world.
WORLD_CALLS_ALLOWED: dict[tuple[str, str], str] = {}
WORLD_CALLS = re.compile(
    r"(datetime\.(now|utcnow|today)|date\.today|time\.(time|time_ns)|random\..+|secrets\..+|os\.urandom|(uuid\.)?uuid[1467])"
)

# The servers of the tests are other processes: only time shows whether they are up.
SLEEP_ALLOWED = ("tests/servers/",)
MOCKS = ("unittest.mock", "mock", "pytest_mock")

OUR_IMPORT = re.compile(r"\s*(?:from|import)\s+((?:trellis|tests|bench)(?:\.\w+)*)\b")

CLASS_DEFINED = re.compile(r"^class (\w+)", re.MULTILINE)
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
SQL_START = re.compile(
    r"^\s*(SELECT|INSERT|UPDATE|DELETE|WITH|CREATE|ALTER|DROP|MERGE|TRUNCATE)\b.*\b(FROM|INTO|SET|AS|TABLE|INDEX|VIEW|FUNCTION|TRIGGER|ROLE|SCHEMA|USING)\b",
    re.IGNORECASE | re.DOTALL,
)
# Spelt in pieces so that this file does not break its own rule.
MACHINE_PATHS = re.compile(r"(?<![\w.~}])/(work|root|home)" + r"/[\w.]")
ADDRESS = re.compile(r"https?:" + r"//|--(index-url|extra-index-url|find-links|trusted-host)")


LOOKED_AT = (
    ast.Call,
    ast.Import,
    ast.ImportFrom,
    ast.ExceptHandler,
    ast.JoinedStr,
    ast.BinOp,
    ast.Expr,
)


# -- reading the code --------------------------------------------------------------------------------------------


@cache
def repository_files() -> tuple[Path, ...]:
    """The files that are, or would be, committed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name.decode() for name in listing.stdout.split(b"\0") if name)
    return tuple(path for path in paths if path.is_file())


def python_files(folder: Path, having: re.Pattern[str] | None = None) -> list[Path]:
    """The Python files of a folder, those whose text has what a rule is about: parsing all of them takes long."""
    files = sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)
    return files if having is None else [path for path in files if having.search(text_of(path) or "")]


def relative(path: Path, base: Path = ROOT) -> str:
    return path.relative_to(base).as_posix()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax that a rule here looks at."""
    return tuple(node for node in ast.walk(_parsed(path)) if isinstance(node, LOOKED_AT))


@cache
def _parsed(path: Path) -> ast.Module:
    """The syntax of a file. It stays, so the collector need not look through it: that took as long as all parsing."""
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        gc.freeze()
        gc.enable()


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a file, also those of classes; one inside another is part of it."""
    blocks: list[ast.stmt] = list(_parsed(path).body)
    while blocks:
        block = blocks.pop()
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef):
            yield block
        else:
            blocks += [*getattr(block, "body", ()), *getattr(block, "orelse", ())]


def calls(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes(path):
        if isinstance(node, ast.Call):
            yield node.lineno, dotted(node.func)


def dotted(node: ast.expr) -> str:
    """`time.sleep` as it is written; an ellipsis stands for a beginning that is not a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "…", *reversed(parts)])


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every absolute module name that is imported, as written."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


@cache
def text_of(path: Path) -> str | None:
    """The text of a file, or None if it holds bytes."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return None


def report(found: list[str], instead: str) -> None:
    assert not found, instead + "\n  " + "\n  ".join(found)


# -- size and completeness ---------------------------------------------------------------------------------------


def test_modules_are_short():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in python_files(PACKAGE)}
    long = [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > MODULE_LINES_MAX]
    report(long, f"Split modules of more than {MODULE_LINES_MAX} lines by what they are about:")


def test_functions_are_short():
    long = [
        f"{relative(path)}:{function.lineno} {function.name}"
        for path in python_files(PACKAGE)
        for function in functions(path)
        if (function.end_lineno or 0) - function.lineno + 1 > FUNCTION_LINES_MAX
    ]
    report(long, f"Functions of more than {FUNCTION_LINES_MAX} lines decide and apply at once; take them apart:")


def test_variables_are_named_for_what_they_hold():
    named = [
        f"{relative(path)}:{function.lineno} {function.name}: {', '.join(sorted(names))}"
        for path in python_files(PACKAGE)
        for function in functions(path)
        if (names := set(_own_names(function)) & PARTICIPLES)
    ]
    report(named, "These names say what happened to a value; name it for what it is:")


def _own_names(function: ast.AST) -> Iterator[str]:
    """The arguments and variables of a function, without those of a comprehension."""
    todo = list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, ast.comprehension | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            todo.extend(ast.iter_child_nodes(node))


def test_class_names_are_unique_in_the_package():
    places: dict[str, list[str]] = {}
    for path in python_files(PACKAGE):
        for match in CLASS_DEFINED.finditer(text_of(path) or ""):
            places.setdefault(match[1], []).append(relative(path))
    twice = [f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1]
    report(twice, "These class names are defined more than once; name each for what it is")


def test_source_has_no_unfinished_code():
    found = [
        f"{relative(path)}:{number} {line.strip()}"
        for path in sorted(PACKAGE.rglob("*"))
        if path.suffix in {".py", ".sql"}
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    report(found, "Finish it or take it out; plans belong elsewhere:")


# -- decisions and the world -------------------------------------------------------------------------------------


def test_broad_except_only_where_listed():
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files(PACKAGE, re.compile(r"Exception|except:"))
        if relative(path, PACKAGE) not in BROAD_EXCEPT_ALLOWED
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type)
    ]
    report(found, "Catch what can be decided here, or add the file to BROAD_EXCEPT_ALLOWED with the reason:")


def _is_broad(caught: ast.expr | None) -> bool:
    names = [ast.unparse(name) for name in (caught.elts if isinstance(caught, ast.Tuple) else [caught]) if name]
    return not names or bool({"Exception", "BaseException"} & set(names))


def test_time_ids_and_randomness_come_in_as_arguments():
    found = [
        f"{relative(path)}:{line} {call}()"
        for part in DETERMINISTIC_PARTS
        for path in [*python_files(PACKAGE / part, WORLD_CALLS), *PACKAGE.glob(f"{part}.py")]
        for line, call in calls(path)
        if WORLD_CALLS.fullmatch(call) and (relative(path, PACKAGE), call) not in WORLD_CALLS_ALLOWED
    ]
    report(found, "Take it as an argument, or add it to WORLD_CALLS_ALLOWED with the reason:")


def test_allow_lists_name_only_what_exists():
    listed = [*BROAD_EXCEPT_ALLOWED, *(path for path, _ in WORLD_CALLS_ALLOWED)]
    report([path for path in listed if not (PACKAGE / path).is_file()], "Remove what is gone from the allow-lists:")


def test_sql_lives_in_sql_files():
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files(PACKAGE / "ledgers")
        for node in nodes(path)
        if isinstance(node, ast.expr) and _builds_sql(node)
    ]
    report(found, "Write the statement in a .sql file, by name, with parameters:")


def _builds_sql(node: ast.expr) -> bool:
    """An f-string, a `%`, a `+` or a `.format` whose first literal part begins like a statement."""
    if isinstance(node, ast.JoinedStr):
        return _starts_sql(
            "".join(str(part.value) if isinstance(part, ast.Constant) else " x " for part in node.values)
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.Add) and isinstance(node.left, ast.Constant):
        return _starts_sql(node.left.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return isinstance(node.func.value, ast.Constant) and _starts_sql(node.func.value.value)
    return False


def _starts_sql(value: object) -> bool:
    return isinstance(value, str) and bool(SQL_START.match(value))


def test_the_package_root_is_for_users_only():
    """Inside, a name is imported from where it lives; `from trellis import …` would hide an arrow from the layers check."""
    found = [
        f"{relative(path)}:{line}"
        for path in python_files(PACKAGE, re.compile(r"(from|import) trellis\b(?!\.)"))
        for line, module in imports(path)
        if module == "trellis"
    ]
    report(found, "Import from the module that defines the name:")


# -- tests -------------------------------------------------------------------------------------------------------


def test_tests_never_sleep():
    found = [
        f"{relative(path)}:{line} {call}()"
        for path in python_files(TESTS, re.compile(r"sleep\("))
        if not relative(path).startswith(SLEEP_ALLOWED)
        for line, call in calls(path)
        if call in {"time.sleep", "sleep"}
    ]
    report(found, "Wait for the thing itself, or move the settable clock:")


def test_tests_drop_no_error_of_a_task():
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files(TESTS, re.compile(r"return_exceptions=True"))
        for node in nodes(path)
        if isinstance(node, ast.Expr) and any(_returns_errors(one) for one in ast.walk(node))
    ]
    report(
        found, "Look at the answers, or wait with tests.stopped_tasks.stopped: a TypeError of the test is lost here:"
    )


def _returns_errors(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(one.arg == "return_exceptions" for one in node.keywords)


def test_tests_use_the_real_thing():
    found = [
        f"{relative(path)}:{line} {module}"
        for path in python_files(TESTS, re.compile("mock"))
        for line, module in imports(path)
        if module in MOCKS or module.startswith("unittest.mock")
    ]
    report(found, "Run the real thing instead of a mock:")


# -- the repository ----------------------------------------------------------------------------------------------


def test_no_file_holds_a_path_of_one_machine():
    found = [
        f"{relative(path)}:{number} {line.strip()[:100]}"
        for path in repository_files()
        for number, line in enumerate((text_of(path) or "").splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    report(found, "Use a path relative to the checkout, a setting or a temporary folder:")


def test_locks_hold_hashes_and_no_address():
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    assert locks
    found = [f"{relative(path)}: {match[0]}" for path in locks if (match := ADDRESS.search(path.read_text()))]
    found += [f"{relative(path)}: {name} has no hash" for path in locks for name in _without_hash(path.read_text())]
    report(found, "Make them with `make lock`:")


def _without_hash(lock: str) -> list[str]:
    entries = re.split(r"\n(?=\S)", lock.strip())
    return [entry.split()[0] for entry in entries if "==" in entry and "--hash=sha256:" not in entry]


def test_imported_modules_are_in_the_repository():
    """A module that git ignores works here and nowhere else."""
    kept = set(repository_files())
    found = [
        f"{relative(path)}:{number} {imported[1]}"
        for path in sorted(kept)
        if path.suffix == ".py"
        for number, line in enumerate((text_of(path) or "").splitlines(), 1)
        if (imported := OUR_IMPORT.match(line)) and not _is_kept(imported[1], kept)
    ]
    report(found, "Add the module, or do not import it:")


def _is_kept(module: str, kept: set[Path]) -> bool:
    base = ROOT / "src" if module.startswith("trellis") else ROOT
    place = base.joinpath(*module.split("."))
    return (
        place.with_suffix(".py") in kept or place / "__init__.py" in kept or any(place in file.parents for file in kept)
    )


def test_the_package_installed_is_this_checkout():
    spec = importlib.util.find_spec("trellis")
    if spec is None or spec.origin is None:
        pytest.skip("the package has no code yet")
    assert Path(spec.origin).is_relative_to(PACKAGE)
