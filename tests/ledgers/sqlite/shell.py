"""A plain SQL shell on a ledger's file: none of our code, no pragma, only what the file itself enforces."""

from collections import deque
from pathlib import Path
from typing import Any

import apsw

from trellis.lifecycles import LIFECYCLES, Lifecycle, Phase, Progress, Role, Transition, Trigger, event_code

READY, RESTING, PARKED, HELD, ENDED_WELL, ENDED_OTHERWISE = range(1, 7)
LENGTH = 31_000_000
AT = 1_800_000_000_000_000
EVENT = """INSERT INTO trellis_event (job, version, type, source, target, role, actor, epoch, generation, attempt, at,
  place, wait) VALUES (:job, :version, :type, :source, :target, :role, 1, :epoch, :generation, :attempt, :at, :place, :wait)"""
LETTER = """INSERT INTO trellis_dead_letter (job, version, reason, stage, last_error, attempts, at)
  VALUES (?, ?, 'policy_violation', 'exec', 'it had to end', 1, 0)"""


class Shell:
    """What a person with a SQL prompt can do to the file."""

    def __init__(self, path: Path) -> None:
        self.db: Any = apsw.Connection(str(path))
        self.db.execute("PRAGMA synchronous = OFF")  # how soon a power cut forgets is no matter here
        self._next = self.value("SELECT coalesce(max(id), 0) FROM trellis_job")

    def value(self, sql: str, *bindings):
        return self.db.execute(sql, bindings).fetchall()[0][0]

    def rows(self, sql: str, *bindings) -> list[tuple]:
        return self.db.execute(sql, bindings).fetchall()

    def dump(self) -> dict[str, list[tuple]]:
        """Everything the ledger's tables hold."""
        tables = self.rows(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'trellis_%' ORDER BY name"
        )
        return {name: self.rows(f"SELECT * FROM {name}") for (name,) in tables}

    def refusal(self, sql: str, *bindings) -> str | None:
        """What the database says to a statement that it refuses; None when it takes it. Nothing stays either way."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            self.db.execute(sql, bindings).fetchall()
        except apsw.ConstraintError as error:
            return str(error)
        finally:
            self.db.execute("ROLLBACK")
        return None

    def new_job(self, lifecycle: Lifecycle, *, key: int | None = None, parent: int | None = None) -> int:
        """A job without a state: its first event submits it."""
        self._next += 1
        self.db.execute("INSERT OR IGNORE INTO trellis_actor (id, name) VALUES (1, 'somebody')")
        self.db.execute(
            "INSERT INTO trellis_job (id, lifecycle, type, prio, max_attempts, ckey) VALUES (?, ?, 1, 2, 5, ?)",
            (self._next, lifecycle.code, key),
        )
        self.db.execute(
            "INSERT INTO trellis_submission (id, job_id, created_at, max_attempts, max_deaths, parent, payload)"
            " VALUES (?, ?, ?, 5, 2, ?, x'7b7d')",
            (self._next, f"raw-{self._next}", AT, None if parent is None else f"raw-{parent}"),
        )
        return self._next

    def event(self, job: int, transition: Transition, lifecycle: Lifecycle, role: Role, **changed) -> dict:
        """The values of an event that makes a transition from where the job stands."""
        version, epoch, generation, attempt = self.rows(
            "SELECT version, epoch, generation, attempt FROM trellis_job WHERE id = ?", job
        )[0]
        opens = transition.opens
        target = lifecycle.by_name[transition.target]
        place = place_of(lifecycle, transition.target)
        values = {
            "job": job,
            "version": version + 1,
            "type": event_code(transition.event),
            "source": lifecycle.code_of(transition.source),
            "target": lifecycle.code_of(transition.target),
            "role": role.code,
            "epoch": epoch + 1,
            "generation": generation + (opens is Progress.GENERATION),
            "attempt": 0 if opens is Progress.GENERATION else attempt + (opens is Progress.ATTEMPT),
            "at": AT,
            "place": place,
            "wait": LENGTH if target.phase is Phase.HELD else None,
        }
        return values | changed

    def make(self, job: int, transition: Transition, lifecycle: Lifecycle, role: Role | None = None) -> None:
        """Make one declared transition by hand."""
        role = role or min(transition.actors)
        values = self.event(job, transition, lifecycle, role)
        if lifecycle.by_name[transition.target].dead_letter:
            self.db.execute(LETTER, (job, values["version"]))
        if transition.finalizes:
            self.name_artifact(job, self.staged(job))
        self.db.execute(EVENT, values)

    def staged(self, job: int) -> int:
        """A new artifact of a job."""
        lifecycle = LIFECYCLES["artifact"]
        artifact = self.new_job(lifecycle, parent=job)
        self.make(artifact, way(lifecycle, "staged")[0], lifecycle)
        return artifact

    def name_artifact(self, job: int, artifact: int) -> None:
        """What goes before the event of a completion."""
        self.db.execute("INSERT OR REPLACE INTO trellis_finalizing VALUES (?, ?)", (job, artifact))

    def job_in(self, lifecycle_name: str, state: str, *, key: int | None = None) -> int:
        """A new job walked to a state by declared transitions."""
        lifecycle = LIFECYCLES[lifecycle_name]
        steps = way(lifecycle, state)
        parent = self.job_in("queue-job", "ARTIFACT_WRITE") if lifecycle_name == "artifact" else None
        job = self.new_job(lifecycle, key=key, parent=parent)
        for transition in steps:
            if transition.trigger == Trigger.FINALIZE:
                assert parent is not None
                self.complete_with(parent, job)
            else:
                self.make(job, transition, lifecycle)
        return job

    def complete_with(self, job: int, artifact: int) -> None:
        """The one statement that completes a queue job and finalizes its artifact."""
        lifecycle = LIFECYCLES["queue-job"]
        completion = next(t for t in lifecycle.transitions if t.finalizes)
        self.name_artifact(job, artifact)
        self.db.execute(EVENT, self.event(job, completion, lifecycle, min(completion.actors)))


def place_of(lifecycle: Lifecycle, state_name: str) -> int:
    """A place that fits a state; a claimable one is ready."""
    state = lifecycle.by_name[state_name]
    if state.phase is Phase.HELD:
        return HELD
    if state.phase is Phase.ENDED:
        return ENDED_WELL if state.success else ENDED_OTHERWISE
    return READY if state.claimable else RESTING


def way(lifecycle: Lifecycle, target: str) -> list[Transition]:
    """The shortest declared way from nothing to a state."""
    ways: dict[str | None, list[Transition]] = {None: []}
    queue: deque[str | None] = deque([None])
    while target not in ways:
        state = queue.popleft()
        for transition in lifecycle.transitions:
            if transition.source == state and transition.target not in ways:
                ways[transition.target] = [*ways[state], transition]
                queue.append(transition.target)
    return ways[target]
