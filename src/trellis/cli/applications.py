"""Imports the user's application MODULE:APP from the working folder."""

import importlib
import sys
import traceback
from pathlib import Path

from trellis.engine.errors import OptionInvalid, TrellisError
from trellis.worker.app import App

PACKAGE = Path(__file__).resolve().parents[1]


def load_app(spec: str) -> App:
    """The application `module:attribute`; raises OptionInvalid with the place where its import failed."""
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise _unusable(spec, "write MODULE:APP, such as shop.jobs:app")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.split(".")[: error.name.count(".") + 1] == error.name.split("."):
            raise _unusable(spec, f"there is no module {error.name} in {Path.cwd()} or installed") from error
        raise _broken(spec, error) from error
    except Exception as error:
        # The application's own code may raise anything during the import.
        raise _broken(spec, error) from error
    candidate = getattr(module, attribute, None)
    if not isinstance(candidate, App):
        apps = [name for name, value in vars(module).items() if isinstance(value, App)]
        hint = f"it has {', '.join(apps)}" if apps else "it has no App at its top level"
        what = "is no App" if hasattr(module, attribute) else "does not exist"
        raise _unusable(spec, f"{attribute} {what} in {module_name}; {hint}")
    return candidate


def _unusable(spec: str, expected: str) -> OptionInvalid:
    return OptionInvalid(option="MODULE:APP", value=spec, expected=expected)


def _broken(spec: str, error: BaseException) -> OptionInvalid:
    """The error with the place where the application's code failed; --debug shows the whole traceback."""
    where = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else _own_line(error)
    detail = str(error).rstrip(".") if isinstance(error, TrellisError) else f"{type(error).__name__}: {error}"
    return _unusable(spec, f"importing it failed at {where}: {detail} (--debug shows all)")


def _own_line(error: BaseException) -> str:
    """The last traceback line in the application's own code, because that is what its author can fix."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not (Path(frame.filename).is_relative_to(PACKAGE) or _is_machinery(frame))]
    last = (theirs or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def _is_machinery(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith("<frozen")
