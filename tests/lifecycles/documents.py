"""The lifecycles as the source documents and the decisions have them, transcribed by hand.

Nothing here is computed from the code: this is the other copy, against which the code is held. A row is
`source  target  trigger  roles  event  progress  fence  origin`; `-` as source is a job that comes into being, progress
is what the step opens (same attempt, next attempt, new generation), fence says whether only the lease holder may make
it, and origin is the document's table (`doc`) or the decision that added the row.
"""

from typing import NamedTuple


class Row(NamedTuple):
    source: str | None
    target: str
    trigger: str
    roles: frozenset[str]
    event: str
    opens: str
    fenced: bool
    origin: str


class Place(NamedTuple):
    name: str
    phase: str
    rank: int


# D54, word for word: w waiting, h held, e ended, and the rank.
D54 = {
    "run": "requested w0, queued w1, running h2, completed e3, failed e3",
    "queue-job": (
        "PENDING w0, QUEUED w1, CONTEXT_ASSEMBLY h2, NOTEBOOKLM_CALL h3, ARTIFACT_WRITE h4, RETRY_BACKOFF w5, "
        "FAILED w6, COMPLETE e6, DEAD e7, DISCARDED e8"
    ),
    "nlm-job": (
        "ACCEPTED w0, FETCHING_CONTEXT h1, BUILDING_PROMPT h2, NLM_QUERY h3, STRUCTURING h4, CALLBACK h5, DONE e6, "
        "ERROR e6"
    ),
    # D67: suspended. Decision 0041: discarded, here and above.
    "leased-job": (
        "queued w0, assigned h1, running h2, succeeded e3, failed e3, cancelled e3, dead_lettered e3, suspended w0, "
        "discarded e4"
    ),
    "bus-job": (
        "PENDING w0, SCHEDULED w1, DISPATCHED h2, RUNNING h3, SUCCEEDED e4, FAILED e4, CANCELLED e4, DENIED e4, "
        "TIMEOUT e4"
    ),
    "proposal": (
        "pending w0, approved w1, auto_approved w1, applying h2, failed w3, applied e4, rejected e4, expired e4"
    ),
    # Later than D54: the states of D51, which are over as soon as they are left.
    "inbox-entry": "pending w0, processed e1, rejected e1, expired e1",
    # D15: staged, then finalized for good, until an operator cleans up.
    "artifact": "staged w0, finalized w1, discarded e2, removed e2",
}

# 002 §1.4; deadline: §5.1; cancel: D19, applied by the orchestration layer (D43).
RUN = """
-          requested  submit    gateway,orchestrator  run.requested       same  free    doc
requested  queued     accept    orchestrator          run.queued          same  free    doc
queued     running    claim     orchestrator          run.started         same  free    doc
running    running    step      orchestrator          run.step.completed  same  fenced  doc
running    completed  complete  orchestrator          run.completed       same  fenced  doc
running    failed     fail      orchestrator          run.failed          same  fenced  doc
running    failed     deadline  orchestrator          run.failed          same  free    doc
running    failed     cancel    orchestrator          run.failed          same  free    doc
requested  failed     cancel    orchestrator          run.failed          same  free    D19
queued     failed     cancel    orchestrator          run.failed          same  free    D19
"""

# 000 §1.2, row by row; F2 is the requeue of DEAD; a lost lease and a passed deadline are D8, a cancel D19, a discard decision 0041.
QUEUE_JOB = """
-                 PENDING           submit             gateway,orchestrator        job_accepted          same        free    doc
PENDING           QUEUED            validate           orchestrator                job_queued            same        free    doc
QUEUED            CONTEXT_ASSEMBLY  claim              orchestrator                job_claimed           same        free    doc
CONTEXT_ASSEMBLY  NOTEBOOKLM_CALL   snapshot_ready     orchestrator                job_nlm_called        same        fenced  doc
CONTEXT_ASSEMBLY  RETRY_BACKOFF     retry              orchestrator                job_retry_scheduled   same        fenced  doc
NOTEBOOKLM_CALL   ARTIFACT_WRITE    response_received  orchestrator                job_artifact_writing  same        fenced  doc
NOTEBOOKLM_CALL   RETRY_BACKOFF     retry              orchestrator                job_retry_scheduled   same        fenced  doc
ARTIFACT_WRITE    COMPLETE          complete           orchestrator                job_succeeded         same        fenced  doc
ARTIFACT_WRITE    RETRY_BACKOFF     retry              orchestrator                job_retry_scheduled   same        fenced  doc
RETRY_BACKOFF     QUEUED            due                orchestrator                job_queued            attempt     free    doc
RETRY_BACKOFF     FAILED            exhaust            orchestrator                job_failed            same        free    doc
FAILED            DEAD              due                orchestrator                job_dead_lettered     same        free    doc
FAILED            QUEUED            requeue            control-plane               job_requeued          generation  free    doc
DEAD              QUEUED            requeue            control-plane               job_requeued          generation  free    D39
CONTEXT_ASSEMBLY  RETRY_BACKOFF     expire             orchestrator                job_lease_expired     same        free    D8
NOTEBOOKLM_CALL   RETRY_BACKOFF     expire             orchestrator                job_lease_expired     same        free    D8
ARTIFACT_WRITE    RETRY_BACKOFF     expire             orchestrator                job_lease_expired     same        free    D8
CONTEXT_ASSEMBLY  RETRY_BACKOFF     deadline           orchestrator                job_lease_expired     same        free    D8
NOTEBOOKLM_CALL   RETRY_BACKOFF     deadline           orchestrator                job_lease_expired     same        free    D8
ARTIFACT_WRITE    RETRY_BACKOFF     deadline           orchestrator                job_lease_expired     same        free    D8
PENDING           FAILED            cancel             control-plane,orchestrator  job_failed            same        free    D19
QUEUED            FAILED            cancel             control-plane,orchestrator  job_failed            same        free    D19
CONTEXT_ASSEMBLY  FAILED            cancel             control-plane,orchestrator  job_failed            same        free    D19
NOTEBOOKLM_CALL   FAILED            cancel             control-plane,orchestrator  job_failed            same        free    D19
ARTIFACT_WRITE    FAILED            cancel             control-plane,orchestrator  job_failed            same        free    D19
RETRY_BACKOFF     FAILED            cancel             control-plane,orchestrator  job_failed            same        free    D19
FAILED            DISCARDED         discard            control-plane               job_discarded         same        free    0041
DEAD              DISCARDED         discard            control-plane               job_discarded         same        free    0041
DISCARDED         QUEUED            requeue            control-plane               job_requeued          generation  free    0041
"""

# 000 §2: the chain, and "any step may go to ERROR".
NLM_JOB = """
-                 ACCEPTED          submit      nlm-backend  nlm_accepted          same  free    doc
ACCEPTED          FETCHING_CONTEXT  claim       nlm-backend  nlm_context_fetching  same  free    doc
FETCHING_CONTEXT  BUILDING_PROMPT   next_stage  nlm-backend  nlm_prompt_building   same  fenced  doc
BUILDING_PROMPT   NLM_QUERY         next_stage  nlm-backend  nlm_queried           same  fenced  doc
NLM_QUERY         STRUCTURING       next_stage  nlm-backend  nlm_structuring       same  fenced  doc
STRUCTURING       CALLBACK          next_stage  nlm-backend  nlm_callback_sending  same  fenced  doc
CALLBACK          DONE              complete    nlm-backend  nlm_done              same  fenced  doc
FETCHING_CONTEXT  ERROR             fail        nlm-backend  nlm_error             same  fenced  doc
BUILDING_PROMPT   ERROR             fail        nlm-backend  nlm_error             same  fenced  doc
NLM_QUERY         ERROR             fail        nlm-backend  nlm_error             same  fenced  doc
STRUCTURING       ERROR             fail        nlm-backend  nlm_error             same  fenced  doc
CALLBACK          ERROR             fail        nlm-backend  nlm_error             same  fenced  doc
ACCEPTED          ERROR             deadline    nlm-backend  nlm_error             same  free    doc
FETCHING_CONTEXT  ERROR             deadline    nlm-backend  nlm_error             same  free    doc
BUILDING_PROMPT   ERROR             deadline    nlm-backend  nlm_error             same  free    doc
NLM_QUERY         ERROR             deadline    nlm-backend  nlm_error             same  free    doc
STRUCTURING       ERROR             deadline    nlm-backend  nlm_error             same  free    doc
CALLBACK          ERROR             deadline    nlm-backend  nlm_error             same  free    doc
ACCEPTED          ERROR             cancel      nlm-backend  nlm_error             same  free    doc
FETCHING_CONTEXT  ERROR             cancel      nlm-backend  nlm_error             same  free    doc
BUILDING_PROMPT   ERROR             cancel      nlm-backend  nlm_error             same  free    doc
NLM_QUERY         ERROR             cancel      nlm-backend  nlm_error             same  free    doc
STRUCTURING       ERROR             cancel      nlm-backend  nlm_error             same  free    doc
CALLBACK          ERROR             cancel      nlm-backend  nlm_error             same  free    doc
"""

# 003, the transitions of both halves; back to queued is D1, requeue D39, the compensation's mark D36, a wait D67.
LEASED_JOB = """
-              queued         submit       control-plane,gateway,orchestrator,submitter,worker  job_queued           same        free    doc
queued         assigned       claim        worker                                               job_claimed          same        free    doc
assigned       running        start        worker                                               job_started          same        fenced  doc
running        succeeded      complete     worker                                               job_succeeded        same        fenced  doc
running        failed         fail         worker                                               job_failed           same        fenced  doc
queued         cancelled      cancel       control-plane,submitter,sweeper                      job_cancelled        same        free    doc
assigned       cancelled      cancel       control-plane,submitter,sweeper                      job_cancelled        same        free    doc
running        cancelled      cancel       control-plane,submitter,sweeper                      job_cancelled        same        free    doc
assigned       cancelled      stop         worker                                               job_cancelled        same        fenced  doc
running        cancelled      stop         worker                                               job_cancelled        same        fenced  doc
queued         dead_lettered  dead_letter  control-plane                                        job_dead_lettered    same        free    doc
assigned       dead_lettered  dead_letter  control-plane                                        job_dead_lettered    same        free    doc
running        dead_lettered  dead_letter  control-plane                                        job_dead_lettered    same        free    doc
queued         dead_lettered  deadline     sweeper                                              job_dead_lettered    same        free    doc
assigned       dead_lettered  deadline     sweeper                                              job_dead_lettered    same        free    doc
running        dead_lettered  deadline     sweeper                                              job_dead_lettered    same        free    doc
assigned       dead_lettered  exhaust      sweeper                                              job_dead_lettered    same        free    doc
running        dead_lettered  exhaust      sweeper                                              job_dead_lettered    same        free    doc
assigned       dead_lettered  reject       worker                                               job_dead_lettered    same        fenced  doc
running        dead_lettered  reject       worker                                               job_dead_lettered    same        fenced  doc
running        queued         retry        worker                                               job_retry_scheduled  attempt     fenced  D1
running        queued         snooze       worker                                               job_snoozed          attempt     fenced  D1
assigned       queued         release      worker                                               job_released         attempt     fenced  D1
running        queued         release      worker                                               job_released         attempt     fenced  D1
assigned       queued         expire       sweeper                                              job_lease_expired    attempt     free    D1
running        queued         expire       sweeper                                              job_lease_expired    attempt     free    D1
failed         queued         requeue      control-plane                                        job_requeued         generation  free    D39
dead_lettered  queued         requeue      control-plane                                        job_requeued         generation  free    D39
succeeded      succeeded      compensated  worker                                               job_compensated      same        free    D36
running        suspended      suspend      worker                                               job_suspended        attempt     fenced  D67
queued         suspended      suspend      control-plane,gateway,orchestrator,submitter,worker  job_suspended        attempt     free    D67
suspended      queued         due          sweeper                                              job_resumed          same        free    D67
suspended      cancelled      cancel       control-plane,submitter,sweeper                      job_cancelled        same        free    D67
suspended      dead_lettered  dead_letter  control-plane                                        job_dead_lettered    same        free    D67
suspended      dead_lettered  deadline     sweeper                                              job_dead_lettered    same        free    D67
failed         discarded      discard      control-plane                                        job_discarded        same        free    0041
dead_lettered  discarded      discard      control-plane                                        job_discarded        same        free    0041
discarded      queued         requeue      control-plane                                        job_requeued         generation  free    0041
queued         queued         run_now      control-plane                                        job_expedited        same        free    0041
queued         queued         prioritize   control-plane                                        job_reprioritized    same        free    0041
"""

# 004's chart and its list of who performs what; the next attempt and the deadline of what waits are D30, what rests for a person or a
# time D45, the compensation of a step D36.
BUS_JOB = """
-           PENDING     submit    gateway,reconciler,submitter        job_accepted         same     free    doc
PENDING     SCHEDULED   validate  scheduler                           job_scheduled        same     free    doc
SCHEDULED   DISPATCHED  claim     scheduler                           job_dispatched       same     free    doc
DISPATCHED  RUNNING     start     worker                              job_started          same     fenced  doc
RUNNING     SUCCEEDED   complete  worker                              job_succeeded        same     fenced  doc
RUNNING     FAILED      fail      worker                              job_failed           same     fenced  doc
SCHEDULED   DENIED      deny      control-plane,owner,scheduler       job_denied           same     free    doc
DISPATCHED  TIMEOUT     exhaust   reconciler                          job_timed_out        same     free    doc
RUNNING     TIMEOUT     exhaust   reconciler                          job_timed_out        same     free    doc
DISPATCHED  TIMEOUT     deadline  reconciler                          job_timed_out        same     free    doc
RUNNING     TIMEOUT     deadline  reconciler                          job_timed_out        same     free    doc
PENDING     CANCELLED   cancel    control-plane,reconciler,submitter  job_cancelled        same     free    doc
SCHEDULED   CANCELLED   cancel    control-plane,reconciler,submitter  job_cancelled        same     free    doc
DISPATCHED  CANCELLED   cancel    control-plane,reconciler,submitter  job_cancelled        same     free    doc
RUNNING     CANCELLED   cancel    control-plane,reconciler,submitter  job_cancelled        same     free    doc
DISPATCHED  SCHEDULED   retry     scheduler                           job_retry_scheduled  attempt  fenced  D30
RUNNING     SCHEDULED   retry     scheduler                           job_retry_scheduled  attempt  fenced  D30
DISPATCHED  SCHEDULED   expire    reconciler                          job_lease_expired    attempt  free    D30
RUNNING     SCHEDULED   expire    reconciler                          job_lease_expired    attempt  free    D30
PENDING     TIMEOUT     deadline  reconciler                          job_timed_out        same     free    D30
SCHEDULED   TIMEOUT     deadline  reconciler                          job_timed_out        same     free    D30
SCHEDULED   SCHEDULED   hold      safety-kernel                       job_held             same     free    D45
SCHEDULED   SCHEDULED   defer     scheduler                           job_deferred         same     free    D45
SCHEDULED   SCHEDULED   approve   control-plane,owner                 job_approved         same     free    D45
SUCCEEDED   SUCCEEDED   compensated  worker                           job_compensated      same     free    D36
"""

# D22 is this lifecycle's own table (001 §2.5 has only `pending` and the gateway's answer `auto_applied`).
PROPOSAL = """
-              pending        submit        gateway,orchestrator  proposal.created        same     free    doc
pending        approved       approve       owner                 proposal.approved       same     free    doc
pending        rejected       reject        owner                 proposal.rejected       same     free    doc
pending        auto_approved  auto_approve  gateway               proposal.auto_approved  same     free    doc
pending        expired        due           apply-engine          proposal.expired        same     free    doc
approved       applying       claim         apply-engine          proposal.applying       same     free    doc
auto_approved  applying       claim         apply-engine          proposal.applying       same     free    doc
failed         applying       claim         apply-engine          proposal.applying       attempt  free    doc
applying       applied        complete      apply-engine          proposal.applied        same     fenced  doc
applying       failed         fail          apply-engine          proposal.failed         same     fenced  doc
applying       failed         expire        apply-engine          proposal.failed         same     free    doc
failed         rejected       reject        owner                 proposal.rejected       same     free    doc
"""

# D51.
INBOX_ENTRY = """
-        pending    submit   gateway  inbox.received   same  free  doc
pending  processed  process  gateway  inbox.processed  same  free  doc
pending  rejected   reject   gateway  inbox.rejected   same  free  doc
pending  expired    due      gateway  inbox.expired    same  free  doc
"""

# D15: the backend stages, the orchestration layer finalizes with COMPLETE; cleanup: ART-5. What nobody names is discarded, by an operator too (ART-8).
ARTIFACT = """
-          staged     submit    nlm-backend               artifact.staged     same  free  doc
staged     finalized  finalize  orchestrator              artifact.finalized  same  free  doc
staged     discarded  discard   nlm-backend,orchestrator,control-plane  artifact.discarded  same  free  doc
staged     discarded  due       orchestrator              artifact.discarded  same  free  doc
finalized  removed    clean_up  control-plane             artifact.removed    same  free  doc
"""

FINALIZES = {("queue-job", "ARTIFACT_WRITE", "complete")}
"""JQ-5: the steps that finalize the artifact they name, in the same transaction."""


def rows(table: str) -> tuple[Row, ...]:
    """The rows of one of the tables above."""
    return tuple(_row(*line.split()) for line in table.strip().splitlines())


def _row(source: str, target: str, trigger: str, roles: str, event: str, opens: str, fence: str, origin: str) -> Row:
    assert opens in {"same", "attempt", "generation"}
    assert fence in {"free", "fenced"}
    return Row(
        source=None if source == "-" else source,
        target=target,
        trigger=trigger,
        roles=frozenset(roles.split(",")),
        event=event,
        opens=opens,
        fenced=fence == "fenced",
        origin=origin,
    )


def places(lifecycle: str) -> tuple[Place, ...]:
    """The states of D54 for one lifecycle."""
    phases = {"w": "waiting", "h": "held", "e": "ended"}
    pairs = (entry.split() for entry in D54[lifecycle].split(", "))
    return tuple(Place(name, phases[code[0]], int(code[1:])) for name, code in pairs)


TABLES: dict[str, tuple[Row, ...]] = {
    "run": rows(RUN),
    "queue-job": rows(QUEUE_JOB),
    "nlm-job": rows(NLM_JOB),
    "leased-job": rows(LEASED_JOB),
    "bus-job": rows(BUS_JOB),
    "proposal": rows(PROPOSAL),
    "inbox-entry": rows(INBOX_ENTRY),
    "artifact": rows(ARTIFACT),
}
