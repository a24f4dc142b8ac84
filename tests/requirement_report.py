"""Which requirement is proven by which tests, and with what result.

A test names what it proves with `@pytest.mark.requirement("DJ-2", "D1")`. The IDs are the rows of
`docs/reference/requirements.md` and `docs/reference/decisions.md`; another one fails the collection. As a pytest
plugin this file writes `build/requirements.json` and a short summary; `python -m tests.requirement_report` prints
the whole table from the results of the last runs (the default suite's and the long proofs').
"""

import argparse
import json
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "docs/reference/requirements.md", ROOT / "docs/reference/decisions.md")
RESULTS_DEFAULT = Path("build/requirements.json")
ID_ROW = re.compile(r"^\| ([A-Z]+-\d+|D\d+) \| ([^|\n]+)", re.MULTILINE)
TEXT_CHARS_MAX = 96
PROPERTY = "requirement"
WORST_FIRST = ("failed", "skipped", "passed")

# requirement -> test -> how often it ended how (a parametrised test ends many times)
Results = dict[str, dict[str, Counter[str]]]


def known_texts() -> dict[str, str]:
    """Every ID with what its row begins with, in the order of the documents."""
    rows = [row for source in SOURCES for row in ID_ROW.findall(source.read_text(encoding="utf-8"))]
    return {name: text.strip() for name, text in rows}


def known_ids() -> list[str]:
    """Every ID, in the order of the documents."""
    return list(known_texts())


def verdict(tests: Mapping[str, Mapping[str, int]]) -> str:
    """The worst end of any test decides; a requirement that no test names is untested."""
    ends = {end for counts in tests.values() for end in counts}
    return next((end for end in WORST_FIRST if end in ends), "untested")


# -- the plugin --------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--requirement-results", type=Path, default=RESULTS_DEFAULT, help="where the results are written")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Marks(set(known_ids())))
    config.pluginmanager.register(Recorder(config.rootpath / config.option.requirement_results))


class Marks:
    """Runs where tests are collected: checks the marks and ties them to the reports."""

    def __init__(self, known: set[str]) -> None:
        self.known = known

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        problems = [problem for found in report.result or () for problem in self._adopt(found)]
        if problems:
            report.outcome = "failed"
            report.longrepr = "\n".join(problems)
            report.result = []
        return report

    def _adopt(self, found: pytest.Item | pytest.Collector) -> Iterable[str]:
        if not isinstance(found, pytest.Item):
            return
        named = [name for mark in found.iter_markers(PROPERTY) for name in mark.args]
        found.user_properties.extend((PROPERTY, name) for name in dict.fromkeys(named))
        for name in named:
            if name not in self.known:
                yield f"{found.nodeid}: {name!r} is in none of {', '.join(source.name for source in SOURCES)}"


class Recorder:
    """Runs once, where the reports of all processes arrive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marks: dict[str, set[str]] = {}
        self.ends: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        named = {str(value) for name, value in report.user_properties if name == PROPERTY}
        if not named:
            return
        self.marks[report.nodeid] = named
        # A test passes only if set-up, call and tear-down do.
        ends = [report.outcome, *([self.ends[report.nodeid]] if report.nodeid in self.ends else [])]
        self.ends[report.nodeid] = min(ends, key=WORST_FIRST.index)

    def results(self) -> Results:
        results: Results = defaultdict(lambda: defaultdict(Counter))
        for node, named in self.marks.items():
            for name in named:
                results[name][node.partition("[")[0]][self.ends[node]] += 1
        return results

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.results(), indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.marks:
            return
        known, results = known_ids(), self.results()
        verdicts = {name: verdict(results.get(name, {})) for name in known}
        counts = Counter(verdicts.values())
        line = ", ".join(f"{counts[end]} {end}" for end in ("passed", "failed", "skipped", "untested") if counts[end])
        terminalreporter.write_line(f"requirements: {line} of {len(known)}")
        broken = [name for name, end in verdicts.items() if end == "failed"]
        if broken:
            terminalreporter.write_line(f"requirements failed: {', '.join(broken)}")


# -- the table ---------------------------------------------------------------------------------------------------


def read_results(paths: Iterable[Path]) -> Results:
    merged: Results = defaultdict(lambda: defaultdict(Counter))
    for path in paths:
        for name, tests in json.loads(path.read_text(encoding="utf-8")).items():
            for test, counts in tests.items():
                merged[name][test].update(counts)
    return merged


def table(known: Mapping[str, str], results: Results) -> Iterable[str]:
    """Each requirement with its text and how it stands, then its tests with how they ended."""
    for name, text in known.items():
        tests = results.get(name, {})
        yield f"{name:<8} {verdict(tests):<9} {textwrap.shorten(text, TEXT_CHARS_MAX, placeholder=' …')}"
        for test, counts in sorted(tests.items()):
            ends = ", ".join(f"{counts[end]} {end}" for end in reversed(WORST_FIRST) if counts.get(end))
            yield f"           {test}  ({ends})"


def _written_at(path: Path) -> str:
    """When these results came about: those of the long proofs may be older than those of the default suite."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC")


def main() -> int:
    parser = argparse.ArgumentParser(description="Print requirement -> tests -> result from the last runs.")
    parser.add_argument("results", nargs="*", type=Path, help="result files (default: build/requirements*.json)")
    paths = parser.parse_args().results or sorted((ROOT / RESULTS_DEFAULT.parent).glob("requirements*.json"))
    if not paths:
        print("no results yet: run make test or make conformance", file=sys.stderr)
        return 2
    known, results = known_texts(), read_results(paths)
    print("\n".join(table(known, results)))
    counts = Counter(verdict(results.get(name, {})) for name in known)
    print("\nfrom " + ", ".join(f"{path.name} of {_written_at(path)}" for path in paths), end="")
    print(f"\n{len(known)} requirements and decisions: " + ", ".join(f"{n} {end}" for end, n in counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
