"""Mutants of the security review: each takes away one guard that closed a finding, and names the test that is its reproduction.

H1 to H4 and M1 to M8 are the findings that the review called high and medium; L are low ones that a guard closed. What each finding was:

    H1  a submitter undid or held up another's workflow        M3  a token of an agent's runtime changed another agent's memory
    H2  ... took the ids of another's compensation or retry    M4  a token for one NLM job read every agent's memory
    H3  strangers had everybody's request bodies refused       M5  idle connections used up the file descriptors
    H4  a PostgreSQL login read and cancelled another's jobs   M6  a stranger took a tenant's idempotency key
    M1  an approved payload was swapped                        M7  trellis.toml of a stranger's folder got the token
    M2  an approval hid what the worker is told                M8  any sender on the bus cancelled any job; signatures
                                                                   could be left out, redirected and sent again
"""

from tests.mutants.mutant import Mutant

BUS = "tests/bus/test_two_tenants.py"
HTTP = "tests/gateway/test_two_tenants.py"
PYTHON = "tests/client/test_two_tenants.py"
SQL = "tests/ledgers/postgres/test_two_tenants.py"
RESERVED = "tests/ledgers/conformance/test_reserved_ids.py"
BODIES = "tests/gateway/test_bodies.py"
CONNECTIONS = "tests/gateway/test_connections.py"
DISPATCH = "tests/bus/safety/test_dispatch.py"
SIGNING = "tests/bus/test_signatures.py"
TOKENS_GO = "tests/http/test_where_tokens_go.py"
NAMES = "tests/client/test_principal_names.py"
PRIVATE = "tests/engine/test_private_files.py"
OUTPUT = "tests/cli/test_output.py"
WORKER = "tests/worker/test_on_bus.py"
COMMANDS = "tests/cli/test_tokens.py"
MCP = "tests/cli/test_mcp.py"


def _one_party(*tests: str) -> Mutant:
    """Steps of one parent count together, whoever submitted them."""
    return Mutant(
        file="bus/outcomes/job_tree.py",
        old="from trellis.auth.principals import party_of\n",
        new='\n\ndef party_of(_: str) -> str:\n    return ""\n\n\n',
        tests=tests,
    )


def _within_any_reach(*tests: str) -> Mutant:
    """A database login reaches every job."""
    return Mutant(
        file="ledgers/postgres/functions/12_ownership.sql",
        old="  select not _is_limited() or exists (select from rule_grant r where r.rule = 'jobs.read' and r.role = p_role",
        new="  select true or exists (select from rule_grant r where r.rule = 'jobs.read' and r.role = p_role",
        tests=tests,
    )


HIGH: dict[str, Mutant] = {
    "H1-undone": _one_party(f"{BUS}::test_a_failed_step_of_another_tenant_compensates_nothing"),
    "H1-held-up": _one_party(f"{BUS}::test_a_step_of_another_tenant_delays_no_workflow"),
    "H1-linked-over-http": Mutant(
        file="auth/ownership.py",
        old="        if party_of(await submitter_of(ledger, other)) != party_of(principal.name):",
        new="        if not party_of(await submitter_of(ledger, other)):",
        tests=(f"{HTTP}::test_a_step_hangs_below_a_job_of_its_submitter_only",),
    ),
    "H1-linked-from-python": Mutant(
        file="auth/ownership.py",
        old="    await _check_links(principal, ledger, job)",
        new="    _ = _check_links",
        tests=(f"{PYTHON}::test_no_verb_reaches_a_job_of_another",),
    ),
    "H1-linked-over-the-bus": Mutant(
        file="auth/ownership.py",
        old="    if parent is None or parent.place is JobPlace.LEASED or await is_of_sender(ledger, parent, sender_id):",
        new="    if parent is None or parent.place is not None or await is_of_sender(ledger, parent, sender_id):",
        tests=(f"{BUS}::test_a_sender_hangs_jobs_below_its_own_and_below_what_it_works_on",),
    ),
    "H2-compensation-on-sqlite": Mutant(
        file="ledgers/sqlite/submit.py",
        old="            check_new_id(job.job_id, job.lifecycle, actor.role)",
        new="            _ = check_new_id",
        tests=("tests/bus/test_compensation.py::test_ids_of_a_compensation_cannot_be_taken_before_it_is_made",),
    ),
    "H2-alike-jobs-on-sqlite": Mutant(
        file="ledgers/sqlite/submit.py",
        old="    check_new_ids(ids, common.lifecycle, actor.role)",
        new="    _ = check_new_ids",
        tests=(
            "tests/ledgers/conformance/test_submit.py::test_jobs_of_a_call_are_refused_together_if_one_id_is_reserved",
        ),
    ),
    "H2-alike-jobs": Mutant(
        file="engine/jobs.py",
        old="    if any(map(text.__contains__, RESERVED_ID_MARKS)):",
        new="    if any(map(text.__contains__, RESERVED_ID_MARKS[1:])):",
        tests=(
            "tests/ledgers/conformance/test_submit.py::test_jobs_of_a_call_are_refused_together_if_one_id_is_reserved",
        ),
    ),
    "H2-retry": Mutant(
        file="engine/jobs.py",
        old=r'RESERVED_ID_PATTERN = r"(\.(c|r[0-9]+|q-[0-9a-f]+)|@[0-9]+)\Z"',
        new=r'RESERVED_ID_PATTERN = r"(\.(c|q-[0-9a-f]+)|@[0-9]+)\Z"',
        tests=(f"{RESERVED}::test_a_derived_id_is_refused_to_everybody_but_the_role_that_derives_it",),
    ),
    "H2-over-http": Mutant(
        file="engine/jobs.py",
        old="    if _reserved.search(job_id) and DERIVING_ROLES.get(lifecycle) is not role:",
        new="    if _reserved.search(job_id) and lifecycle not in DERIVING_ROLES:",
        tests=("tests/gateway/test_bus_jobs.py::test_ids_that_the_engine_derives_are_refused",),
    ),
    "H2-sql": Mutant(
        file="ledgers/postgres/functions/40_submit.sql",
        old="  if _id_is_reserved(p_job_id, p_lifecycle, p_role) then",
        new="  if false then",
        tests=(f"{RESERVED}::test_sql_cannot_take_a_derived_id_either",),
    ),
    "H3-budget": Mutant(
        file="http_server/bodies.py",
        old="self.body_s, authenticated=bool(self._rules))",
        new="self.body_s, authenticated=True)",
        tests=(f"{BODIES}::test_bodies_without_authentication_take_nothing_of_what_the_others_may_have",),
    ),
    "H3-size-and-time": Mutant(
        file="http_server/bodies.py",
        old="        self._body_s = body_s if authenticated else min(body_s, UNAUTHENTICATED_S)",
        new="        self._body_s = body_s",
        tests=(f"{BODIES}::test_a_callback_that_stalls_or_is_large_is_ended_soon",),
    ),
    "H3-one-address": Mutant(
        file="http_server/bodies.py",
        old=" or self._arriving[address] >= UNAUTHENTICATED_OF_ADDRESS_MAX:",
        new=":",
        tests=(f"{BODIES}::test_senders_without_authentication_share_what_there_is_by_address",),
    ),
    "H3-one-network": Mutant(
        file="net/targets.py",
        old="    return str(ip.ipv4_mapped or ip_network((ip, 64), strict=False))",
        new="    return address",
        tests=(f"{BODIES}::test_addresses_of_one_ipv6_network_count_as_one_client",),
    ),
    "H4-locked-retention": Mutant(
        file="ledgers/postgres/functions/90_feed_retention.sql",
        old="  if not _try_work_lock('retain') then",
        new="  if not pg_try_advisory_xact_lock(hashtext('trellis.retain')) then",
        tests=(f"{SQL}::test_a_login_that_holds_advisory_locks_stops_nobody",),
    ),
    "H4-locked-key": Mutant(
        file="ledgers/postgres/functions/11_work_locks.sql",
        old="returns void language plpgsql set lock_timeout = '3s' as $$\nbegin",
        new="returns void language plpgsql set lock_timeout = '3s' as $$\nbegin\n  set local lock_timeout = 0;",
        tests=(f"{SQL}::test_a_login_that_holds_the_lock_of_a_bounded_key_does_not_stop_submits",),
    ),
    "H4-cancelled": _within_any_reach(f"{SQL}::test_a_login_cancels_its_own_jobs_and_learns_nothing_about_others"),
    "H4-moved": _within_any_reach(f"{SQL}::test_a_login_moves_nothing_of_another"),
    "H4-read": Mutant(
        file="ledgers/postgres/migrations/0011_own_rows.sql",
        old="using ((select reads_all()) or owns(id))', of_jobs);",
        new="using (true)', of_jobs);",
        tests=(f"{SQL}::test_a_login_reads_nothing_of_another_login",),
    ),
    "H4-named": Mutant(
        file="ledgers/postgres/functions/12_ownership.sql",
        old="  return case when _is_limited() then 'db:' || session_user || ':' || p_name else p_name end;",
        new="  return p_name;",
        tests=(f"{SQL}::test_a_login_cannot_write_another_name_into_the_history",),
    ),
    "H4-acts": Mutant(
        file="ledgers/postgres/functions/68_acts.sql",
        old="  if _is_limited() and (p_id is not null or p_facts is not null) then",
        new="  if false then",
        tests=(f"{SQL}::test_a_limited_gateway_gives_no_act_an_id_or_facts_and_sets_no_issuer",),
    ),
    "H4-issuer": Mutant(
        file="ledgers/postgres/functions/66_issuer.sql",
        old="  if _is_limited() then",
        new="  if false then",
        tests=(f"{SQL}::test_a_limited_gateway_gives_no_act_an_id_or_facts_and_sets_no_issuer",),
    ),
    "H4-linked": Mutant(
        file="ledgers/postgres/functions/12_ownership.sql",
        old="  if not _is_limited() then return; end if;\n  select u.job_id into foreign_id",
        new="  return;\n  select u.job_id into foreign_id",
        tests=(
            f"{SQL}::test_a_login_links_its_jobs_to_its_own_only",
            f"{SQL}::test_the_ledgers_own_client_is_held_to_the_same",
        ),
    ),
    "H4-stepped": Mutant(
        file="ledgers/postgres/functions/12_ownership.sql",
        old="where d.id = any(p_ids) and o.db_role <> session_user)",
        new="where d.id = any(p_ids) and o.db_role is null)",
        tests=(f"{SQL}::test_a_worker_steps_with_leases_of_its_own_login_only",),
    ),
}

MEDIUM: dict[str, Mutant] = {
    "M1-swapped": Mutant(
        file="bus/pointers.py",
        old="        digest = digest_in(pointer)\n",
        new="        digest = None\n",
        tests=(
            "tests/worker/test_on_bus.py::test_a_payload_that_was_changed_under_its_pointer_never_reaches_the_handler",
        ),
    ),
    "M1-shown": Mutant(
        file="bus/pointers.py",
        old="        digest = digest_in(pointer)\n",
        new="        digest = None\n",
        tests=("tests/gateway/test_bus_jobs.py::test_a_payload_that_was_written_over_is_shown_to_nobody",),
    ),
    "M2-shown": Mutant(
        file="bus/approvals.py",
        old='    return work.model_dump(mode="json", exclude_defaults=True)',
        new='    hidden = {"memory_id", "context_hints", "budget", "meta", "compensation"}\n'
        '    return work.model_dump(mode="json", exclude_defaults=True, exclude=hidden)',
        tests=(f"{DISPATCH}::test_an_approval_shows_every_field_that_the_worker_receives",),
    ),
    "M2-bound": Mutant(
        file="bus/scheduling/dispatch_policy.py",
        old='        "order_hash": request_within_policy(request, decision.get("constraints") or {}, decision.get("redacted")).hash,\n',
        new="",
        tests=(f"{DISPATCH}::test_an_approval_is_void_when_the_kernel_allows_something_else_under_the_same_policy",),
    ),
    "M3-bound-to-an-agent": Mutant(
        file="runs/memory_access.py",
        old="    if only is not None and only != agent:",
        new="    if only is not None and not agent:",
        tests=(f"{HTTP}::test_a_token_for_one_agent_proposes_and_reads_nothing_of_another",),
    ),
    "M3-bound-to-none": Mutant(
        file="auth/ownership.py",
        old="    if principal.by_token and principal.agent is None and by_runtime:",
        new="    if principal.by_token and not principal.roles and by_runtime:",
        tests=(f"{HTTP}::test_a_token_of_a_runtime_that_names_no_agent_reaches_none",),
    ),
    "M4-bound-to-a-job": Mutant(
        file="runs/memory_access.py",
        old="    if principal.job_id is None:\n",
        new="    if principal.roles:\n",
        tests=(f"{HTTP}::test_a_token_for_one_job_reads_memory_and_artifacts_of_its_agent_alone",),
    ),
    "M5-descriptors": Mutant(
        file="http_server/connections.py",
        old="        if len(self._open) < self._max and descriptor < self._descriptor_max and not self._beyond:",
        new="        if len(self._open) < self._max:",
        tests=(f"{CONNECTIONS}::test_more_idle_connections_than_descriptors_keep_nobody_out",),
    ),
    "M5-log": Mutant(
        file="http_server/limits.py",
        old="        if key in self._counts:",
        new="        if key not in self._counts and False:",
        tests=(f"{CONNECTIONS}::test_server_refuses_clients_and_logs_once_when_descriptors_run_out",),
    ),
    "M6-over-http": Mutant(
        file="auth/ownership.py",
        old="    return replace(job, idempotency_scope=owner_scope(owner, job.idempotency_scope))",
        new="    return job",
        tests=(f"{HTTP}::test_idempotency_key_of_another_tenant_cannot_be_taken",),
    ),
    "M6-over-the-bus": Mutant(
        file="auth/ownership.py",
        old="    return replace(job, idempotency_scope=owner_scope(owner, job.idempotency_scope))",
        new="    return job",
        tests=(f"{BUS}::test_a_sender_takes_nobodys_key",),
    ),
    "M6-sql": Mutant(
        file="ledgers/postgres/functions/40_submit.sql",
        old="case when p_idempotency_key is not null then _of_login('key:')",
        new="case when p_idempotency_key is not null then 'key:'",
        tests=(f"{SQL}::test_keys_of_two_logins_are_two_keys",),
    ),
    "M7-gateway-of-the-file": Mutant(
        file="app/settings.py",
        old='        if not self.token_may_go_to("gateway"):',
        new='        if not self.token_may_go_to(""):',
        tests=(f"{TOKENS_GO}::test_a_command_sends_its_token_to_a_gateway_that_was_named",),
    ),
    "M7-in-clear": Mutant(
        file="http/calls.py",
        old="            if is_readable_on_the_way(self.url) and not self.options.plain_http:",
        new='            if is_readable_on_the_way(self.url) and self.url == "":',
        tests=(f"{TOKENS_GO}::test_a_token_goes_unencrypted_to_another_machine_only_where_that_is_allowed",),
    ),
    "M8-cancelled-over-the-bus": Mutant(
        file="bus/scheduling/intake.py",
        old="            own = await self._is_of(job, packet.sender_id)\n",
        new="            own = bool(job)\n",
        tests=(f"{BUS}::test_a_sender_cancels_its_own_jobs_alone",),
    ),
    "M8-cancelled-from-python": Mutant(
        file="auth/ownership.py",
        old='    own = await is_own(principal, "jobs.cancel", ledger, job)\n',
        new="    own = bool(job)\n",
        tests=(f"{PYTHON}::test_no_verb_reaches_a_job_of_another",),
    ),
    "M8-left-out": Mutant(
        file="bus/wire/signatures.py",
        old="        return self.required or self._key_of(sender_id) is not None",
        new="        return self.required",
        tests=(f"{SIGNING}::test_unsigned_packet_of_a_sender_with_a_known_key_is_refused",),
    ),
    "M8-redirected": Mutant(
        file="bus/wire/signatures.py",
        old="        if signed.audience is not None and signed.audience != delivery.subject:",
        new="        if signed.audience is not None and not delivery.subject:",
        tests=(f"{SIGNING}::test_a_packet_that_was_signed_for_one_subject_is_refused_on_another",),
    ),
    "M8-old": Mutant(
        file="bus/wire/signatures.py",
        old="        if abs(age) > window or (signed.expires_at is not None and signed.expires_at < delivery.at):",
        new="        if not window and not age:",
        tests=(f"{SIGNING}::test_a_signed_packet_is_taken_while_it_is_fresh",),
    ),
    "M8-sent-again": Mutant(
        file="bus/wire/signatures.py",
        old="        self._seen[seen] = delivery.sequence\n",
        new="",
        tests=(f"{SIGNING}::test_a_signed_packet_that_is_sent_again_is_refused",),
    ),
}

LOW: dict[str, Mutant] = {
    "L-bytes-on-a-terminal": Mutant(
        file="cli/output.py",
        old="        if self.console.is_terminal:\n            self.line(",
        new="        if self.console.is_terminal:\n            self.console.file.write(",
        tests=(f"{OUTPUT}::test_result_bytes_are_escaped_on_a_terminal_and_unchanged_in_a_pipe",),
    ),
    "L-unseen": Mutant(
        file="cli/output.py",
        old='    r"|[\\u00ad\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b-\\u200d',
        new='    r"|[\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f',
        tests=(f"{OUTPUT}::test_no_character_of_unicode_that_is_a_control_or_shown_as_nothing_gets_through",),
    ),
    "L-trailer": Mutant(
        file="http_server/server.py",
        old="        if self._in_head:\n            super().on_header(name, value)",
        new="        super().on_header(name, value)",
        tests=(f"{CONNECTIONS}::test_headers_after_a_body_are_not_believed",),
    ),
    "L-ledger-readable": Mutant(
        file="ledgers/sqlite/connection.py",
        old="        make_private(target.path)",
        new="        _ = make_private",
        tests=(f"{PRIVATE}::test_files_of_an_instance_are_unreadable_for_other_users",),
    ),
    "L-objects-readable": Mutant(
        file="engine/private_files.py",
        old="PRIVATE_FOLDER = 0o700",
        new="PRIVATE_FOLDER = 0o755",
        tests=(f"{PRIVATE}::test_files_of_an_instance_are_unreadable_for_other_users",),
    ),
    "L-key-of-another-user": Mutant(
        file="engine/private_files.py",
        old="    if status.st_uid not in {os.geteuid(), 0}:",
        new="    if status.st_uid < 0:",
        tests=(f"{PRIVATE}::test_a_key_of_another_user_is_none",),
    ),
    "L-bus-key-readable": Mutant(
        file="engine/private_files.py",
        old="    if stat.S_IMODE(file_status.st_mode) & (_NOT_OWN_SECRET if is_own else _NOT_ROOT_SECRET):",
        new="    if not body:",
        tests=(f"{SIGNING}::test_a_private_key_that_others_can_read_is_refused",),
    ),
    "L-log-of-strangers": Mutant(
        file="http_server/limits.py",
        old="            self._counts[key] += 1\n            return",
        new="            self._counts[key] += 1",
        tests=(f"{CONNECTIONS}::test_unreadable_requests_are_logged_at_a_bounded_rate",),
    ),
    "L-issuer": Mutant(
        file="auth/tokens.py",
        old="    recorded = recorded_name(name, issuer=foreign_issuer, tenant=tenant)",
        new="    recorded = recorded_name(name, tenant=tenant)",
        tests=(f"{HTTP}::test_an_owner_is_an_issuer_and_a_subject_and_a_tenant",),
    ),
    "L-issuer-replaced": Mutant(
        file="app/wiring.py",
        old="    if known not in {None, home}:",
        new="    if known == home == None:",
        tests=(f"{COMMANDS}::test_an_instance_with_another_issuer_does_not_take_over_the_names_of_the_first",),
    ),
    "L-reads-of-commands": Mutant(
        file="cli/invocation.py",
        old='    return ledger if sees_all(principal, "jobs.read") else',
        new='    return ledger if sees_all(principal, "jobs.read") or True else',
        tests=(f"{COMMANDS}::test_a_token_reads_with_commands_what_it_reads_over_http",),
    ),
    "L-name-of-a-limited-login": Mutant(
        file="auth/ownership.py",
        old="            return events[0].actor.removeprefix(ledger.name_prefix)",
        new="            return events[0].actor",
        tests=(f"{SQL}::test_a_token_through_a_limited_login_has_the_jobs_that_it_submitted_there",),
    ),
    "L-homoglyph": Mutant(
        file="auth/principals.py",
        old='    mixed = len(scripts) > 1 and not scripts <= {"LATIN", "EAST ASIAN"}',
        new="    mixed = not name and bool(scripts)",
        tests=(f"{NAMES}::test_a_name_that_can_be_taken_for_another_is_refused_when_it_is_issued",),
    ),
    "L-trailing-space": Mutant(
        file="auth/tokens.py",
        old='    fault = name_fault(name) if isinstance(name, str) else "it must be text"',
        new='    fault = None if isinstance(name, str) else "it must be text"',
        tests=(f"{NAMES}::test_and_when_it_is_verified",),
    ),
    # Guards of the MCP server, which no review has found missing.
    "L-mcp-decides-without-a-token": Mutant(
        file="mcp_server/protocol.py",
        old="        if tool.decides and not self.decides:",
        new="        if tool.decides and not tool.changes:",
        tests=(f"{MCP}::test_a_local_instance_is_used_as_the_person_who_started_it_but_nobody_decides",),
    ),
    "L-mcp-origin": Mutant(
        file="gateway/routes/mcp.py",
        old="        if origin is not None and not _is_own(",
        new="        if origin is None and not _is_own(origin or '',",
        tests=("tests/gateway/test_mcp.py::test_pages_of_other_origins_may_not_use_the_tools",),
    ),
    "L-mcp-header": Mutant(
        file="mcp_server/protocol.py",
        old="        if headers.get(name) != value:",
        new="        if headers.get(name) is None:",
        tests=("tests/gateway/test_mcp.py::test_messages_that_are_none_or_contradict_their_headers_are_refused",),
    ),
    "L-no-diff": Mutant(
        file="proposals/apply.py",
        old="    before = None if there is None else there.body\n    after =",
        new="    before = None\n    after =",
        tests=("tests/gateway/test_proposals.py::test_proposal_diff_shows_the_present_change",),
    ),
}

SECURITY: dict[str, Mutant] = {**HIGH, **MEDIUM, **LOW}
FINDINGS = ("H1", "H2", "H3", "H4", "M1", "M2", "M3", "M4", "M5", "M6", "M7", "M8")
