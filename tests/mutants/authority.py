"""Mutants of the requirements AUTH: who may do what."""

from tests.mutants.mutant import Mutant

CELLS = "tests/gateway/test_authority.py"

AUTHORITY: dict[str, Mutant] = {
    # A cell of the matrix of jobs is another one than in the document.
    "AUTH-1": Mutant(
        file="auth/matrices.py",
        old='Role.MEMORY: _row("artifacts.read rules.read")',
        new='Role.MEMORY: _row("artifacts.read artifacts.cleanup rules.read")',
        tests=(f"{CELLS}::test_every_cell_of_a_matrix_is_as_the_document_has_it",),
    ),
    # Whoever has no role that may is let in where the thing is not known yet.
    "AUTH-2": Mutant(
        file="auth/matrices.py",
        old="if role in principal.roles and (whole or own is not False):",
        new="if (role in principal.roles or own is None) and (whole or own is not False):",
        tests=(f"{CELLS}::test_every_role_is_refused_what_no_rule_gives_it_and_nothing_changes",),
    ),
    # A token for one job reaches the jobs of others.
    "AUTH-3": Mutant(
        file="auth/ownership.py",
        old="return job_id == principal.job_id",
        new="return bool(job_id)",
        tests=(
            f"{CELLS}::test_job_of_another_owner_and_missing_job_give_the_same_answer",
            f"{CELLS}::test_a_backend_whose_token_names_no_job_has_none",
        ),
    ),
    # Layer 2 is read by whoever may read layer 1.
    "AUTH-4": Mutant(
        file="gateway/routes/memory.py",
        old='caller: Annotated[Caller, requires("memory.read-deep")]',
        new='caller: Annotated[Caller, requires("memory.read")]',
        tests=("tests/gateway/test_proposals.py::test_layer_2_is_read_part_by_part_and_never_with_layer_1",),
    ),
    # A token that was made for another service is taken.
    "AUTH-5": Mutant(
        file="auth/tokens.py",
        old="if AUDIENCE not in (",
        new="if audience is None and AUDIENCE not in (",
        tests=(
            "tests/gateway/test_bad_tokens.py::test_every_bad_token_is_refused_with_what_to_change_and_never_repeated",
        ),
    ),
    # Every proposal approves itself.
    "AUTH-6": Mutant(
        file="proposals/proposal.py",
        old='return body["action"] == MEMORY_UPDATE and body["priority"] == "normal" and not body[',
        new='return bool(body["action"]) or not body[',
        tests=(
            "tests/gateway/test_proposals.py::test_a_person_approves_what_was_seen_and_it_is_applied_once",
            "tests/runs/test_end_to_end.py::test_only_approved_proposals_are_applied",
        ),
    ),
    # A role without a row is given one that grants nothing.
    "AUTH-7": Mutant(
        file="auth/matrices.py",
        old="missing = [role.value for role in Role if role not in rows]",
        new="missing, rows = list[str](), {role: rows.get(role, MatrixRow()) for role in Role}",
        tests=(f"{CELLS}::test_a_role_without_a_row_cannot_be_loaded",),
    ),
}
