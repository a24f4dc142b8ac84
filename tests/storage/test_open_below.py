"""Opening a path below a folder: no link is followed on any level, with the one call of the kernel and without it."""

import errno
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from trellis.storage.objects import open_below as module
from trellis.storage.objects.open_below import OPEN_FOLDER, open_below, open_stepwise

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
Open = Callable[[int, Sequence[bytes], int], int]


@pytest.fixture
def folder(tmp_path: Path) -> Generator[int]:
    (tmp_path / "outside" / "b").mkdir(parents=True)
    (tmp_path / "outside" / "b" / "file.json").write_bytes(b"outside")
    (tmp_path / "top" / "a" / "b").mkdir(parents=True)
    (tmp_path / "top" / "a" / "b" / "file.json").write_bytes(b"inside")
    (tmp_path / "top" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "top" / "a" / "near").symlink_to("b")
    (tmp_path / "top" / "a" / "b" / "link.json").symlink_to("file.json")
    fd = os.open(tmp_path / "top", OPEN_FOLDER)
    yield fd
    os.close(fd)


def open_descriptors() -> int:
    """How many this process has; 0 where the system does not say."""
    listed = Path("/proc/self/fd")
    return len(list(listed.iterdir())) if listed.exists() else 0


@pytest.fixture(params=[open_below, open_stepwise])
def opens(request: pytest.FixtureRequest) -> Open:
    return request.param


def test_a_file_and_its_folder_are_opened(opens: Open, folder: int):
    with os.fdopen(opens(folder, (b"a", b"b", b"file.json"), READ), "rb") as file:
        assert file.read() == b"inside"
    below = opens(folder, (b"a", b"b"), OPEN_FOLDER)
    assert os.stat("file.json", dir_fd=below).st_size == len(b"inside")
    os.close(below)


def test_the_folder_itself_is_opened_anew(opens: Open, folder: int):
    again = opens(folder, (), OPEN_FOLDER)
    assert again != folder
    assert os.path.sameopenfile(again, folder)
    os.close(again)


@pytest.mark.parametrize(
    "names", [(b"link", b"b", b"file.json"), (b"a", b"near", b"file.json"), (b"a", b"b", b"link.json")]
)
def test_no_link_is_followed_on_any_level(opens: Open, folder: int, names: tuple[bytes, ...]):
    with pytest.raises(OSError) as refused:  # noqa: PT011 - the number says it
        opens(folder, names, READ)
    assert refused.value.errno in {errno.ELOOP, errno.ENOTDIR}


@pytest.mark.parametrize("names", [(b"a", b"none", b"file.json"), (b"a", b"b", b"none.json"), (b"none",)])
def test_what_is_not_there_is_not_found(opens: Open, folder: int, names: tuple[bytes, ...]):
    with pytest.raises(FileNotFoundError):
        opens(folder, names, READ)


def test_no_descriptor_stays_open(opens: Open, folder: int):
    before = open_descriptors()
    for names in ((b"a", b"none"), (b"a", b"near", b"file.json"), (b"a", b"b", b"file.json", b"x")):
        with pytest.raises(OSError):  # noqa: PT011 - any
            opens(folder, names, READ)
    os.close(opens(folder, (b"a", b"b", b"file.json"), READ))
    assert open_descriptors() == before


@pytest.mark.skipif(not module.HAS_OPENAT2, reason="only where the kernel has the call")
def test_a_folder_of_a_run_is_opened_with_one_call(folder: int, monkeypatch: pytest.MonkeyPatch):
    def stepwise(*_: object) -> int:
        raise AssertionError("step by step")

    monkeypatch.setattr(module, "open_stepwise", stepwise)
    os.close(open_below(folder, (b"a", b"b"), OPEN_FOLDER))


def test_a_kernel_without_the_call_gets_steps(folder: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "OPENAT2", module.ctypes.c_long(100_000))  # ENOSYS
    os.close(open_below(folder, (b"a", b"b", b"file.json"), READ))
