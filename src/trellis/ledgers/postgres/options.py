"""Options of retention and of the sweep, in the form in which functions of the database take them."""

import json

from trellis.engine.records import RetentionOptions, SweepOptions
from trellis.ledgers.refusals import lifecycle_named
from trellis.ledgers.retention_plan import stored_ages


def ages_json(options: RetentionOptions) -> str:
    """How long jobs are kept, in the form of `retain`: the states that are not kept for ever."""
    ages = stored_ages(options).items()
    return json.dumps(
        [{"code": code, "keep_s": age.keep_s, "is_set": age.is_set} for code, age in ages if age.keep_s is not None]
    )


def stored_windows(options: SweepOptions) -> str | None:
    """The configured windows by lifecycle and state number; None where the lifecycles' own timers apply."""
    named = ((lifecycle_named(name), state, window_s) for (name, state), window_s in options.windows_s.items())
    windows = {lc.code * 16 + lc.code_of(state): window_s for lc, state, window_s in named}
    return json.dumps(windows) if windows else None
