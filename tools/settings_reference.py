"""Writes the reference of the settings from `trellis.app.settings`: `python -m tools.settings_reference` (in the checkout).

Each setting has the text under its field. The suite compares docs/reference/settings.md with what this makes.
"""

from __future__ import annotations

import sys

from tools.python_reference import ROOT, class_of, field_docs, inline
from trellis.app import settings
from trellis.app.settings import PREFIX, Settings

PAGE = ROOT / "docs" / "reference" / "settings.md"
INTRODUCTION = """# Settings

Written from `trellis.app.settings` by `python -m tools.settings_reference`; the suite compares. A setting is an
environment variable (`TRELLIS_CONCURRENCY=8`) or a key of `trellis.toml` in the working folder (`concurrency = 8`); the
environment wins. `trellis doctor --settings` prints the values in force and where each comes from. `auto` means
that nothing is set: the text says what happens then. A setting that is set but empty is refused.

| Variable | Default | Meaning |
|---|---|---|
"""


def reference() -> str:
    """The whole page."""
    docs = field_docs(class_of(settings, "Settings"))
    return INTRODUCTION + "".join(
        f"| `{PREFIX}{name.upper()}` | {_default(field.default)} | {inline(docs[name][1])} |\n"
        for name, field in Settings.model_fields.items()
    )


def _default(value: object) -> str:
    match value:
        case None:
            return "auto"
        case bool():
            return f"`{str(value).lower()}`"
        case ():
            return "none"
        case _:
            return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    sys.stderr.write(f"{PAGE.relative_to(ROOT)}\n")
