"""What reaches a terminal: nothing in it commands the terminal, and nothing in it is unseen."""

import io
import json
import logging
import re
import subprocess
import sys
import unicodedata

import pytest

from tests.requirement_report import ROOT
from trellis.app.settings import Settings
from trellis.cli.output import _UNSEEN, Output, escape_terminal_codes
from trellis.cli.telemetry import configure_logging
from trellis.engine.logs import correlated, log_of

HIDDEN = (
    "\x00\x07\x1b\x7f\x85\x9b\u00ad\u034f\u061c\u115f\u1160\u200b\u200d\u200f\u202e\u2028\u2060\u2066\u2800\u3164\ufeff\ufe00\ufe0f"
    "\U000e0041\U000e0100\U000e01ef\ue000"
)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("letter", HIDDEN, ids=ascii)
def test_control_and_invisible_characters_are_escaped_in_output(letter: str):
    told = escape_terminal_codes(f"a{letter}b")
    assert told.isascii()
    assert told.isprintable()
    assert told.encode().decode("unicode_escape") == f"a{letter}b"


def test_no_character_of_unicode_that_is_a_control_or_shown_as_nothing_gets_through():
    """Of those that Unicode calls formats only signs that are seen, such as the sign of an Arabic number, stay."""
    seen = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
    signs = {chr(code) for code in range(0x13430, 0x13456)}  # how hieroglyphs are joined
    letters = map(chr, range(sys.maxunicode + 1))
    unseen = [one for one in letters if unicodedata.category(one) in {"Cc", "Cf", "Cs", "Zl", "Zp"}]
    assert {one for one in unseen if escape_terminal_codes(one) == one} <= {*seen, *signs, "\t", "\n"}


def test_the_console_writes_the_same_characters_out():
    source = (ROOT / "console" / "app" / "src" / "lib" / "unseen.ts").read_text()
    ranges = re.findall(r"\\u\{(\w+)\}(?:-\\u\{(\w+)\})?", source)
    console = {code for first, last in ranges for code in range(int(first, 16), int(last or first, 16) + 1)}
    assert console == {ord(one) for one in _UNSEEN.findall("".join(map(chr, range(sys.maxunicode + 1))))}


def test_letters_of_every_language_and_ends_of_lines_stay():
    text = "Скрипка 1887 - «так»\tالعربية\r\n日本語 é e\u0301 ½ ✓ 🎻\n"  # noqa: RUF001 - letters that look alike are the point
    assert escape_terminal_codes(text) == text


def test_a_return_alone_does_not_write_over_its_line():
    assert escape_terminal_codes("reject\rapprove") == "reject\\x0dapprove"


def test_json_escapes_them_and_means_the_same(capsys: pytest.CaptureFixture[str]):
    record = {"text": f"a{HIDDEN}b é 🎻"}
    Output(as_json=True).record(record)
    out = capsys.readouterr().out
    assert json.loads(out) == record
    assert not set(HIDDEN) & set(out)
    assert "é 🎻" in out


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_of_the_log_hides_nothing(form: str, capsys: pytest.CaptureFixture[str]):
    loggers = [logging.getLogger(), logging.getLogger("trellis")]
    kept = [(one, one.handlers[:], one.level, one.propagate) for one in loggers]
    try:
        configure_logging(Settings.model_validate({"log_format": form}))
        with correlated("press-7"):
            log_of("trellis.test").warning("odd", name=f"a{HIDDEN}b é 🎻")
        log_of("trellis.test").warning("even")
    finally:
        for one, handlers, level, propagate in kept:
            one.handlers[:], one.propagate = handlers, propagate
            one.setLevel(level)
    first, second = capsys.readouterr().err.splitlines()
    assert not set(HIDDEN) & set(first)
    assert "é 🎻" in first
    assert ("press-7" in first, "press-7" in second) == (True, False)
    if form == "json":
        told = json.loads(first)
        assert (told["name"], told["correlation_id"]) == (f"a{HIDDEN}b é 🎻", "press-7")


def test_result_bytes_are_escaped_on_a_terminal_and_unchanged_in_a_pipe(
    capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
):
    body = "{}\u009b2J\u202e\xff".encode() + b"\xff"
    Output(as_json=False).content("j", "context", body)
    assert capsysbinary.readouterr().out == body + b"\n"
    screen = _Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    Output(as_json=False).content("j", "context", body)
    assert "{}\\x9b2J\\u202eÿ\N{REPLACEMENT CHARACTER}" in screen.getvalue()


def test_help_of_a_group_loads_no_pydantic():
    program = "import sys; from trellis.cli import main; main(['jobs', '--help']); sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)
