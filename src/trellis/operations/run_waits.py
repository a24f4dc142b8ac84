"""Explains what a run waits for while a dependency is unavailable or its agent is stopped."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime

from trellis.engine.records import SubscriberRecord
from trellis.operations.explain import JobExplanation, duration
from trellis.runs.projector import SUBSCRIBER_NAME
from trellis.runs.waits import UpstreamWait


def with_wait(
    told: JobExplanation, wait: UpstreamWait, followers: Iterable[SubscriberRecord], now: datetime
) -> JobExplanation:
    """Adds to a run's explanation what it waits for: a dependency or its agent."""
    if not wait.is_bounded:
        return replace(told, why=(*told.why, wait_words(wait, now)))
    about = (wait_words(wait, now), *projector_words(followers, now))
    see = "trellis followers\tsee how far the projector has come"
    return replace(told, why=(*told.why, *about), you_can=(*told.you_can, see))


def wait_words(wait: UpstreamWait, now: datetime) -> str:
    """Says since when and for what the run waits, and that it continues by itself."""
    since = f"{wait.since:%Y-%m-%d %H:%M:%S} UTC ({duration(wait.lasted_s(now))})"
    return f"It waits since {since}: {wait.reason.rstrip('.')}. That takes nothing from its time, and then it goes on."


def projector_words(followers: Iterable[SubscriberRecord], now: datetime) -> Iterator[str]:
    """Says whether a projector runs, and since when it has events to publish."""
    seen = next((one for one in followers if one.name == SUBSCRIBER_NAME), None)
    if seen is None:
        yield "No projector has ever been at work here: start `trellis up --roles projector`."
        return
    if seen.until <= now:
        yield (
            f"No projector is at work: {seen.actor} was the last, until {_moment(seen.until, now)};"
            " start `trellis up --roles projector`."
        )
    if seen.unread_since is not None:
        yield f"The projector has still to publish or record what happened since {_moment(seen.unread_since, now)}."
    elif seen.until > now:
        yield f"The projector {seen.actor} is at work, and nothing is unread."


def _moment(at: datetime, now: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC, {duration((now - at).total_seconds())} ago"
