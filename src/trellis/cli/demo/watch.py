"""Live progress of the demo, read from the feed: lines for notable events, a bar for the rest."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from rich.live import Live
from rich.text import Text

from trellis.cli.output import Output
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, Job
from trellis.lifecycles import LIFECYCLES, Phase
from trellis.operations.explain import event_note

BAR_CELLS = 44
PAGE = 200
STYLES = {"waiting": "yellow", "held": "cyan", "succeeded": "green", "ended": "red"}


@dataclass(kw_only=True)
class DemoWatch:
    """Tracks the place of every job of the demo, as the feed reports it."""

    out: Output
    ledger: Ledger
    position: str
    began: float = field(default_factory=time.monotonic)
    types: dict[JobId, str] = field(default_factory=dict[JobId, str])
    states: dict[JobId, str] = field(default_factory=dict[JobId, str])
    live: Live | None = None

    def __enter__(self) -> Self:
        if self.out.console.is_terminal:
            self.live = Live(self._bar(), console=self.out.console, refresh_per_second=10, transient=True)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def expect(self, job: Job) -> None:
        """Track a job of this demo, because the feed may contain others."""
        self.types[job.job_id] = job.type

    def say(self, text: str, style: str = "") -> None:
        """Print one line with the time since the demo began."""
        line = Text.assemble((f"{time.monotonic() - self.began:5.1f}s  ", "dim"), (text, style))
        self.out.console.print(line, highlight=False, no_wrap=True, overflow="ellipsis")

    async def look(self) -> None:
        """Read the next events of the feed and show what changed."""
        while True:
            page = await self.ledger.feed(self.position, limit=PAGE)
            self.position = page.position
            for event in page.events:
                if event.job_id in self.types:
                    self.states[event.job_id] = event.target
                    self._tell(event)
            if self.live is not None:
                self.live.update(self._bar())
            if not page.events:
                return

    @property
    def all_ended(self) -> bool:
        """Whether all jobs have ended."""
        return all(_kind(self.states.get(job_id, "queued")) in {"succeeded", "ended"} for job_id in self.types)

    def _tell(self, event: Event) -> None:
        name = self.types[event.job_id]
        match event.type:
            case "job_lease_expired":
                self.say(f"{name}: its worker is gone, the lease is over → attempt {event.attempt + 1}", "yellow")
            case "job_retry_scheduled":
                self.say(f"{name}: {event_note(event)} → attempt {event.attempt + 1}", "dim")
            case "job_dead_lettered":
                self.say(f"{name}: dead-lettered: {event_note(event)}", "red")
            case "job_cancelled":
                self.say(f"{name}: cancelled: {event_note(event)}", "red")
            case "job_succeeded" if name == "report.build":
                self.say(f"{name}: succeeded on attempt {event.attempt + 1}", "green")
            case _:
                pass

    def _bar(self) -> Text:
        """All jobs as shares of one line, by their place."""
        counts = Counter(_kind(self.states.get(job_id, "queued")) for job_id in self.types)
        bar, total = Text("        "), max(1, len(self.types))
        for kind in ("succeeded", "ended", "held", "waiting"):
            bar.append("█" * round(BAR_CELLS * counts[kind] / total), STYLES[kind])
        done = counts["succeeded"] + counts["ended"]
        bar.append(f"  {done}/{total} ended, {counts['held']} running", "dim")
        return bar


def _kind(state: str) -> str:
    known = LIFECYCLES["leased-job"].by_name[state]
    if known.phase is Phase.ENDED:
        return "succeeded" if known.success else "ended"
    return known.phase.value
