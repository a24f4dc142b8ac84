"""Finds the Chromium that the tests of the console drive, and installs Debian's where that is possible.

    python tools/browser.py    install a browser if the machine has none and this user may install one

A browser that somebody chose comes first (`TRELLIS_TEST_CHROMIUM`), then the one of the machine, then Debian's package,
which root installs by apt-get. It exists for x86_64 and aarch64. Where nothing helps, setup goes on, and the tests of the
console fail with the sentence `NEEDED`: they are never skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

CHOSEN = "TRELLIS_TEST_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
NEEDED = f"the tests of the console need a Chromium: `sudo apt-get install -y chromium`, or name one by {CHOSEN}"
INSTALL = ("apt-get", "install", "-y", "-qq", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", "chromium")
UPDATE = ("apt-get", "update", "-qq")
APT_S_MAX = 900


def browser_path() -> str | None:
    """The browser for the tests; None if there is none."""
    chosen = os.environ.get(CHOSEN)
    if chosen:
        return shutil.which(chosen)
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def main() -> int:
    """Install a browser if there is none. Ends well in any case: only the tests of the console need it."""
    if browser_path() is None and not os.environ.get(CHOSEN) and shutil.which("apt-get") and os.geteuid() == 0:
        print("Installing Chromium for the tests of the console …", file=sys.stderr, flush=True)
        # A fresh container has no list of packages, and a list that is old may name files that are gone.
        if not succeeds(INSTALL) and succeeds(UPDATE):
            succeeds(INSTALL)
    if browser_path() is None:
        print(f"No browser: {NEEDED}.", file=sys.stderr)
    return 0


def succeeds(command: tuple[str, ...]) -> bool:
    """Whether a command of apt-get did what it should; its last words are printed if not."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=APT_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{' '.join(command[:2])}: {error}", file=sys.stderr)
        return False
    if done.returncode:
        print(f"{' '.join(command[:2])}: {done.stderr.strip()[-500:]}", file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
