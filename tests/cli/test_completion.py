"""Shell completion: the script asks the program, and the program answers with commands and options."""

import pytest

from trellis.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell_asks_this_program(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_TRELLIS_COMPLETE=complete_{shell}" in script
    assert "trellis" in script


@pytest.mark.parametrize(
    "line, offered",
    [("trellis propo", "proposals"), ("trellis dlq re", "requeue"), ("trellis run --wa", "--watch")],
)
def test_a_command_line_is_completed_by_the_shell(
    line: str, offered: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("_TRELLIS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert offered in capsys.readouterr().out.split()
