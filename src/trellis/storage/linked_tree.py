"""Keeps a folder as it is at one instant by hard links, while processes go on replacing its files.

It fits folders whose files are never changed in place: a new version gets a new inode, and the link keeps the old one.
Where the file system has no hard links, files are copied.
"""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EMLINK, errno.EACCES}


def link_tree(
    source: Path,
    target: Path,
    *,
    first: Sequence[str] = (),
    skip: Callable[[str], bool] = lambda _: False,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Make `target` hold the regular files that `source` holds now; returns how many were linked or removed.

    A second call only brings the difference since the first one, which is quick. The entries `first` of the top folder
    are taken before the others; elsewhere names are taken in their order. `skip` gets the name of a file or folder.
    `check` is called in every folder and may raise to give up.
    """
    check()
    target.mkdir(0o700, exist_ok=True)
    changed = 0
    there = {entry.name: entry for entry in os.scandir(source) if not skip(entry.name)}
    kept = {entry.name: entry for entry in os.scandir(target)}
    for name in kept.keys() - there.keys():
        changed += _remove(target / name)
    rank = {name: place for place, name in enumerate(first)}
    for name in sorted(there, key=lambda name: (rank.get(name, len(rank)), name)):
        entry, old = there[name], kept.get(name)
        try:
            if entry.is_dir(follow_symlinks=False):
                if old is not None and not old.is_dir(follow_symlinks=False):
                    changed += _remove(target / name)
                changed += link_tree(source / name, target / name, skip=skip, check=check)
            elif entry.is_file(follow_symlinks=False) and not _is_same(entry, old):
                if old is not None:
                    _remove(target / name)
                _link(source / name, target / name)
                changed += 1
        except FileNotFoundError:  # removed since it was listed
            continue
    return changed


def _is_same(entry: "os.DirEntry[str]", old: "os.DirEntry[str] | None") -> bool:
    """Whether the kept file is the same inode, or a copy of the same time and size."""
    if old is None:
        return False
    if entry.inode() == old.inode():
        return True
    now, then = entry.stat(follow_symlinks=False), old.stat(follow_symlinks=False)
    return then.st_nlink == 1 and (now.st_size, now.st_mtime_ns) == (then.st_size, then.st_mtime_ns)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def _remove(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return 1
