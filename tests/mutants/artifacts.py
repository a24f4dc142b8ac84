"""Mutants of the requirements ART: artifacts."""

from tests.mutants.mutant import Mutant

REGISTRY = "tests/artifacts/test_registry.py"

ARTIFACTS: dict[str, Mutant] = {
    # A field of the schema is missing.
    "ART-1": Mutant(
        file="artifacts/rows.py",
        old='"tags": list(self.tags),',
        new="",
        tests=(f"{REGISTRY}::test_a_finalized_artifact_is_the_document_of_the_schema_and_its_url_leads_to_its_bytes",),
    ),
    # Content may have fields that its type does not know.
    "ART-2": Mutant(
        file="artifacts/content.py",
        old='model_config = pydantic.ConfigDict(extra="forbid", frozen=True)',
        new='model_config = pydantic.ConfigDict(extra="ignore", frozen=True)',
        tests=("tests/artifacts/test_content.py::test_a_field_that_is_missing_or_unknown_is_refused",),
    ),
    # Other content for a final artifact is answered as if it were the same.
    "ART-3": Mutant(
        file="artifacts/registry.py",
        old="if not row.is_of(await asyncio.to_thread(making.body, row.artifact_id, row.created_at)):",
        new="if not row.job_id:",
        tests=(
            (
                "tests/gateway/test_artifacts.py::"
                "test_other_content_for_a_known_job_changes_nothing_and_is_refused_once_the_artifact_is_final"
            ),
        ),
    ),
    # Every POST makes another artifact.
    "ART-4": Mutant(
        file="artifacts/registry.py",
        old="attempt = stage_key(job.job_id, timestamp(job.created_at), making.epoch)",
        new="attempt = self.new_id()",
        tests=(f"{REGISTRY}::test_ten_equal_stages_at_once_make_one_artifact",),
    ),
    # A cleanup takes whatever it is asked to take.
    "ART-5": Mutant(
        file="artifacts/registry.py",
        old="if days < self.keep_days:",
        new="if days < 0:",
        tests=(f"{REGISTRY}::test_no_cleanup_takes_what_the_settings_keep",),
    ),
    # Artifacts lie elsewhere in the object store.
    "ART-6": Mutant(
        file="artifacts/rows.py",
        old="object_key(PROJECTS, _checked_project(cid), 'artifacts')",
        new="object_key(PROJECTS, _checked_project(cid), 'objects')",
        tests=(f"{REGISTRY}::test_a_finalized_artifact_is_the_document_of_the_schema_and_its_url_leads_to_its_bytes",),
    ),
    # A staged artifact is read by everybody.
    "ART-7": Mutant(
        file="artifacts/registry.py",
        old="if row is None or row.state != FINALIZED:\n            return None",
        new="if row is None:\n            return None",
        tests=(f"{REGISTRY}::test_a_staged_or_discarded_artifact_is_there_for_no_reader",),
    ),
    # Whoever may read artifacts may make them.
    "ART-8": Mutant(
        file="artifacts/registry.py",
        old='permit_actor(actor, "artifacts.write")',
        new='permit_actor(actor, "artifacts.read")',
        tests=(f"{REGISTRY}::test_only_the_nlm_backend_makes_artifacts_and_only_an_operator_discards_them",),
    ),
}
