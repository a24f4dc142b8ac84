"""Mutants of what an instance joins: the part is there and tested by itself, and the served instance does without it."""

from tests.mutants.mutant import Mutant

INSTANCE = "app/instance.py"
SERVED = "tests/runs/test_served_instance.py"

WIRING: dict[str, Mutant] = {
    # No service of the instance reads the events that begin runs.
    "RUN-9 wiring": Mutant(
        file=INSTANCE,
        old="""            EventTriggers(
                ledger=self.ledger,
                actor=self.actor(Role.CONTROL_PLANE),
                clock=clock,
                catalog=self.catalog,
                layer=layer,
            ),
""",
        new="",
        tests=(f"{SERVED}::test_an_event_begins_a_run_in_a_served_instance",),
    ),
    # TRELLIS_RUNS limits each process, and not all of them together.
    "D25 wiring": Mutant(
        file=INSTANCE,
        old='await self.ledger.limit_held(self.actor(Role.ORCHESTRATOR), TYPE, self.settings.runs, cause="TRELLIS_RUNS")',
        new="pass",
        tests=(f"{SERVED}::test_the_setting_of_runs_limits_the_runs_of_all_processes_together",),
    ),
}
