"""Runs the tests in several processes that are forked from the one which has collected them: `pytest --processes 4`.

To import and collect all tests takes 14 s of a core, and a fork some milliseconds. The first process collects, hands out the tests
and takes in the reports; it runs no test. Each of the others begins with a run of neighbours, so that a server that they share is
started in few processes. One that has nothing left takes over half of what another has still to do. Tests marked `quiet` are handed
out after all others, one at a time.

A process that dies fails the test that it was running. Another takes its place, a few times; then the suite ends.
"""

import atexit
import contextlib
import os
import pickle
import random
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from _pytest._io import TerminalWriter

OF_ONE_FILE_MAX = 8
"""Tests that a process is given at once: the fewer, the more there is to take over at the end."""
DEATHS_MAX = 4
"""Processes that are replaced in one run."""
END_S = 60.0
"""How long a process may take to end its servers after an interruption."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes", type=int, default=0, help="run the tests in this many processes (default: this one)"
    )


def is_forking(config: pytest.Config) -> bool:
    """Whether the tests run in processes of their own."""
    return bool(config.option.processes) and not config.option.collectonly and not config.option.usepdb


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if is_forking(config) and reporter is not None:
        reporter.showfspath = False  # results of several files arrive mixed


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not is_forking(session.config) or not session.items:
        return None
    if session.testsfailed and not session.config.option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    Distribution(session, min(session.config.option.processes, len(session.items))).run()
    return True


# --- what is to do -------------------------------------------------------------------------------------------------


class Shares:
    """Which process runs which tests. A test is named by its place in the list of all."""

    def __init__(self, files: Sequence[object], last: int, processes: int) -> None:
        """`files` has the file of each test. Tests from place `last` on are handed out at the end, one by one."""
        self._files = files
        self._own = [deque(range(last * n // processes, last * (n + 1) // processes)) for n in range(processes)]
        self._last = deque(range(last, len(files)))

    def take(self, process: int) -> list[int]:
        """The tests that this process runs next: some of one file. Nothing is left when there are none."""
        own = self._own[process]
        if not own:
            self._take_over(own)
        if not own:
            return [self._last.popleft()] if self._last else []
        taken = [own.popleft()]
        while own and len(taken) < OF_ONE_FILE_MAX and self._files[own[0]] == self._files[taken[0]]:
            taken.append(own.popleft())
        return taken

    def give_back(self, process: int, tests: Sequence[int]) -> None:
        """Tests that were taken and not run."""
        self._own[process].extendleft(reversed(tests))

    def _take_over(self, own: deque[int]) -> None:
        """The second half of what the process with the most still has; whole files where it has several."""
        most = max(self._own, key=len)
        half = len(most) // 2
        between = [n for n in range(1, len(most)) if self._files[most[n]] != self._files[most[n - 1]]]
        kept = min(between, key=lambda n: abs(n - half), default=half)
        own.extend(most.pop() for _ in range(len(most) - kept))
        own.reverse()


# --- the process that hands out the tests --------------------------------------------------------------------------


@dataclass
class Process:
    """One that runs tests, as its parent sees it."""

    number: int
    pid: int
    connection: Connection
    given: deque[int]
    """The tests that it has not ended. It runs the first, if it runs one."""
    ended: bool = False
    """It has said that it is done."""
    last_words: str = ""
    """The error that it ends with."""

    def __post_init__(self) -> None:
        name = f"process {self.number}"
        self.node = SimpleNamespace(
            gateway=SimpleNamespace(id=name), _workerinfocache=f"In {name}"
        )  # what pytest prints
        self.pidfd = os.pidfd_open(self.pid)

    def close(self) -> None:
        self.connection.close()
        os.close(self.pidfd)
        os.waitpid(self.pid, 0)


class Distribution:
    """One run: the processes, what they have to do, and where their reports go."""

    def __init__(self, session: pytest.Session, processes: int) -> None:
        self.session = session
        self.hook = session.config.hook
        self.items = session.items
        quiet = [n for n, item in enumerate(self.items) if item.get_closest_marker("quiet")]
        self.shares = Shares([item.path for item in self.items], min(quiet, default=len(self.items)), processes)
        self.running: list[Process] = []
        self.deaths_left = DEATHS_MAX
        self.folder = Path(session.config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
        self.started = 0
        self.count = processes

    def run(self) -> None:
        try:
            first = [
                self.shares.take(number) for number in range(self.count)
            ]  # before one takes over what is another's
            for number, tests in enumerate(first):
                self._start(number, tests)
            while self.running:
                self._listen()
        except BaseException:
            self._interrupt()
            raise
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)
        if self.session.shouldstop:
            raise self.session.Interrupted(self.session.shouldstop)

    def _start(self, number: int, tests: list[int]) -> None:
        here, there = Pipe()
        self.started += 1
        folder = self.folder / f"process-{self.started}"
        with warnings.catch_warnings(
            action="ignore", category=DeprecationWarning
        ):  # about threads, from Python 3.12 on
            pid = os.fork()
        if pid == 0:
            for connection in (here, *(process.connection for process in self.running)):
                connection.close()
            Runner(self.session, there, folder, deque(tests)).run()
        there.close()
        self.running.append(Process(number, pid, here, deque(tests)))

    def _listen(self) -> None:
        ends: dict[Any, Process] = {}
        for process in self.running:
            ends |= {process.connection: process, process.pidfd: process}
        ready = wait(list(ends))
        for process in {id(ends[end]): ends[end] for end in ready}.values():
            try:
                while process.connection.poll():
                    self._take_in(process, *process.connection.recv())
            except (EOFError, ConnectionResetError):
                self._end(process)
            else:
                if process.pidfd in ready:
                    self._end(process)

    def _take_in(self, process: Process, kind: str, what: Any) -> None:
        match kind:
            case "more":
                self._hand_out(process)
            case "start":
                item = self.items[what]
                self.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            case "report":
                report = self.hook.pytest_report_from_serializable(config=self.session.config, data=what)
                report.node = process.node
                self.hook.pytest_runtest_logreport(report=report)
            case "finish":
                process.given.popleft()
                item = self.items[what]
                self.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            case "warning":
                self.hook.pytest_warning_recorded.call_historic(kwargs=what)
            case "error":
                process.last_words = what
            case "done":
                process.ended = True

    def _hand_out(self, process: Process) -> None:
        stops = self.session.shouldfail or self.session.shouldstop
        tests = [] if stops else self.shares.take(process.number)
        process.given.extend(tests)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, which is seen next
            process.connection.send(tests)

    def _end(self, process: Process) -> None:
        self.running.remove(process)
        process.close()
        if process.ended:
            return
        if process.given:
            item = self.items[process.given.popleft()]
            died = f"The process that ran {item.nodeid} has died.\n{process.last_words}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", died, "call")
            report.node = process.node  # type: ignore[attr-defined]
            self.hook.pytest_runtest_logreport(report=report)
        self.shares.give_back(process.number, process.given)
        self.deaths_left -= 1
        if self.deaths_left < 0:
            self.session.shouldfail = f"{DEATHS_MAX + 1} processes have died"
        elif not self.session.shouldfail and (tests := self.shares.take(process.number)):
            self._start(process.number, tests)

    def _interrupt(self) -> None:
        """End the processes: each is asked to end what it has started, and killed if it does not."""
        for process in self.running:
            process.connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
        deadline = time.monotonic() + END_S
        for process in self.running:
            if not wait([process.pidfd], max(0.0, deadline - time.monotonic())):
                os.kill(process.pid, signal.SIGKILL)
            process.close()


# --- a process that runs tests -------------------------------------------------------------------------------------


class Runner:
    """Runs what it is given, and reports."""

    def __init__(self, session: pytest.Session, connection: Connection, folder: Path, tests: deque[int]) -> None:
        self.session = session
        self.tests = tests
        self.connection = connection
        self.folder = folder

    def run(self) -> NoReturn:
        code = 1
        try:
            self._prepare()
            self._run_tests()
            code = 0
        except (KeyboardInterrupt, EOFError, BrokenPipeError, ConnectionResetError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what it has started ends undisturbed
        except BaseException:  # noqa: BLE001 the first process tells it
            self.connection.send(("error", traceback.format_exc()))
        finally:
            with contextlib.suppress(BaseException):
                self.session._setupstate.teardown_exact(None)
            atexit._run_exitfuncs()
            os._exit(code)

    def _prepare(self) -> None:
        """Nothing that belongs to the first process is used or shared: its output, its folder, its chance."""
        config = self.session.config
        atexit._clear()
        random.seed()
        self.folder.mkdir(mode=0o700)
        config._tmp_path_factory._basetemp = self.folder  # type: ignore[attr-defined]
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        if config.pluginmanager.has_plugin("terminalreporter"):
            config.pluginmanager.unregister(name="terminalreporter")
            nowhere = TerminalWriter(Path(os.devnull).open("w"))  # noqa: SIM115 until the process ends
            config.pluginmanager.register(SimpleNamespace(_tw=nowhere), "terminalreporter")
        config.pluginmanager.register(self, "reports-to-the-first-process")

    def _run_tests(self) -> None:
        hook, items = self.session.config.hook, self.session.items
        while self.tests:
            test = self.tests.popleft()
            self.tests = self.tests or self._more()  # a test tears down what the next one does not need
            self.connection.send(("start", test))
            hook.pytest_runtest_protocol(item=items[test], nextitem=items[self.tests[0]] if self.tests else None)
            self.connection.send(("finish", test))
        self.connection.send(("done", None))

    def _more(self) -> deque[int]:
        self.connection.send(("more", None))
        return deque(self.connection.recv())

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self.session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self.connection.send(("report", data))

    @pytest.hookimpl
    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, **where: Any) -> None:
        try:
            pickle.dumps(warning_message)
        except Exception:  # noqa: BLE001 whatever the warning holds, its text can be sent
            warning_message.message = UserWarning(str(warning_message.message))
            warning_message.category = UserWarning
            warning_message.source = None
        self.connection.send(("warning", {"warning_message": warning_message, **where}))
