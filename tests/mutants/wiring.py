"""Mutants of what joins the parts: a part is there and tested by itself, and the instance or an entrance does without it."""

from tests.mutants.mutant import Mutant

INSTANCE = "app/instance.py"
ON_THE_BUS = (
    "tests/bus/test_two_tenants.py::test_the_authority_matrix_decides_about_requests_and_cancels_on_the_bus[sqlite]"
)
SERVED = "tests/runs/test_served_instance.py"
TRIGGERS = "tests/ledgers/conformance/test_event_triggers.py"
HUB = "gateway/hub.py"
WAKES = "tests/gateway/test_stream.py::test_hub_wakes_the_task_of_a_stream_whose_next_events_may_have_to_wait"

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
    # No service of the instance compares the sources of agents.
    "D71 wiring": Mutant(
        file=INSTANCE,
        old="""            SourceChanges(
                ledger=self.ledger,
                actor=self.actor(Role.CONTROL_PLANE),
                objects=self.objects,
                catalog=self.catalog,
                layer=layer,
            ),
""",
        new="",
        tests=(f"{SERVED}::test_the_end_of_a_job_and_a_changed_source_begin_runs_in_a_served_instance",),
    ),
    # What an agent's own runs caused begins it again.
    "D71 chain": Mutant(
        file="runs/trigger_chain.py",
        old="if slug in self.agents:",
        new="if not slug:",
        tests=(f"{TRIGGERS}::test_a_source_that_an_agents_own_run_changed_does_not_begin_it[sqlite]",),
    ),
    # TRELLIS_RUNS limits each process, and not all of them together.
    "D25 wiring": Mutant(
        file=INSTANCE,
        old='await self.ledger.limit_held(self.actor(Role.ORCHESTRATOR), TYPE, self.settings.runs, cause="TRELLIS_RUNS")',
        new="pass",
        tests=(f"{SERVED}::test_the_setting_of_runs_limits_the_runs_of_all_processes_together",),
    ),
    # The intake of the bus asks no rule about requests.
    "AUTH-1 bus": Mutant(
        file="bus/scheduling/intake.py",
        old='permitted = permit(bus_sender(packet.sender_id), "jobs.create")',
        new="permitted = bus_sender(packet.sender_id)",
        tests=(ON_THE_BUS,),
    ),
    # The task of a stream hears nothing of an event that waits for its document, nor of those after a full batch.
    "RUN-5 more follow": Mutant(
        file=HUB,
        old="if not batch.caught_up or not",
        new="if not",
        tests=(f"{WAKES}[held]", f"{WAKES}[more-follow]"),
    ),
    # The hub reads the ledger for a stream that is behind the ring, and all others wait.
    "RUN-5 below the floor": Mutant(
        file=HUB,
        old="own or stream.position < ring.floor or",
        new="own or",
        tests=(f"{WAKES}[below-the-floor]",),
    ),
    # The hub looks up whose jobs they are for a stream of own jobs, and all others wait.
    "RUN-5 own jobs": Mutant(
        file=HUB, old="is None or stream.view.own or", new="is None or", tests=(f"{WAKES}[own-jobs]",)
    ),
}
