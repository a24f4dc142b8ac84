"""A mutant: one change of the program that takes the behaviour of a requirement away, and the tests that notice."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "trellis"
MARK = "pytest.mark.requirement"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """`old` stands once in `file` (below src/trellis) and becomes `new`; `tests` have the requirement's mark.

    The file may be one of Python or of SQL: the changed program makes its schema from its own migrations and functions.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self) -> str:
        """The text of the file with the change made."""
        text = (SOURCE / self.file).read_text(encoding="utf-8")
        found = text.count(self.old)
        if found != 1:
            raise LookupError(f"{self.old!r} is {found} times in {self.file}, and must be there once")
        return text.replace(self.old, self.new)


def requirement_of(name: str) -> str:
    """The requirement that a mutant's name begins with: "DJ-2" and "DJ-2 postgres" are both about DJ-2."""
    return name.partition(" ")[0]


def marks(node: str) -> set[str]:
    """The requirements that the test of this node id is marked with, read from its file without importing it."""
    test, _, case = node.partition("[")
    path, _, name = test.partition("::")
    return _marks_of(path).get(name, set()) | _marks_of(path).get(f"[{case}", set())


def is_there(node: str) -> bool:
    """Whether the file of this node id has a test of its name."""
    path, _, name = node.partition("[")[0].partition("::")
    return name in _marks_of(path)


@cache
def _marks_of(path: str) -> dict[str, set[str]]:
    """The requirements of each test of a file, and of each [case] of its parameters; empty if there is no such file."""
    file = ROOT / path
    if not file.is_file():
        return {}
    module = ast.parse(file.read_text(encoding="utf-8"))
    body = module.body
    everywhere = {
        name
        for node in body
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "pytestmark" for target in node.targets)
        for name in _named(node.value)
    }
    tests = {
        node.name: everywhere.union(*(_named(decorator) for decorator in node.decorator_list))
        for node in body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    }
    return tests | _cases(module)


def _cases(module: ast.Module) -> dict[str, set[str]]:
    """[case] -> requirements, of each `pytest.param` with an id of its own."""
    calls = [one for one in ast.walk(module) if isinstance(one, ast.Call) and ast.unparse(one.func) == "pytest.param"]
    return {
        f"[{keyword.value.value}]": _named(call)
        for call in calls
        for keyword in call.keywords
        if keyword.arg == "id" and isinstance(keyword.value, ast.Constant)
    }


def _named(expression: ast.expr) -> set[str]:
    calls = [one for one in ast.walk(expression) if isinstance(one, ast.Call) and ast.unparse(one.func) == MARK]
    return {str(argument.value) for call in calls for argument in call.args if isinstance(argument, ast.Constant)}
