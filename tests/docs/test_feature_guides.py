"""The pages about one feature each do what they say, and have the numbers of the code."""

import re
from pathlib import Path

import pytest

from tests.docs.documents import LINK, ROOT, run
from trellis.engine.jobs import ATTEMPTS_DEFAULT, ATTEMPTS_MAX, DEATHS_DEFAULT, JOB_SIGNALS_MAX, PAYLOAD_BYTES_MAX
from trellis.engine.retry_policy import RetryPolicy
from trellis.integrations.sql import NOT_IN_SQL
from trellis.ledgers.postgres.notifier import CHANNEL
from trellis.ledgers.sqlite.connection import SQLITE_NEEDED
from trellis.worker.options import CONCURRENCY_DEFAULT, LEASE_S_MAX, LEASE_S_MIN

FOLDER = ROOT / "docs" / "how-to"
TRANSACTIONS = "submit-in-your-transaction.md"
RETRY = RetryPolicy()
PRINTED = {
    "retry-jobs.md": ["2 passed"],
    "limit-concurrency.md": ["2 passed", "At most 2 jobs with key 'a.example' may be held at once"],
    "signals.md": ['"paid 25000 cents"', "2 passed"],
}
STATED = {
    "retry-jobs.md": [
        f"`base_s` {RETRY.base_s:g}, `factor` {RETRY.factor:g}, `max_s` {RETRY.max_s:g}",
        f"default {ATTEMPTS_DEFAULT}, at most {ATTEMPTS_MAX:,}",
        f"`lease_s`, {LEASE_S_MIN:g} to {LEASE_S_MAX:g} seconds",
        f"`max_deaths` deaths (default {DEATHS_DEFAULT})",
    ],
    "limit-concurrency.md": [f"(default {CONCURRENCY_DEFAULT})"],
    TRANSACTIONS: [
        f"must be {'.'.join(map(str, SQLITE_NEEDED))} or newer",
        f"pg_notify('{CHANNEL}', '')",
        *(f"`{name}`" for name in NOT_IN_SQL - {"lifecycle"}),
    ],
    "signals.md": [f"At most {JOB_SIGNALS_MAX:,} signals", f"at most {PAYLOAD_BYTES_MAX // 2**20} MiB"],
}


@pytest.mark.prove
@pytest.mark.parametrize("page", PRINTED)
def test_the_guide_to_a_feature_does_what_it_says(tmp_path: Path, page: str):
    output = run(FOLDER / page, tmp_path, {})
    assert [text for text in PRINTED[page] if text not in output] == [], output


@pytest.mark.prove
def test_the_guide_to_submits_in_a_transaction_does_what_it_says(tmp_path: Path, postgres_url: str):
    output = run(FOLDER / TRANSACTIONS, tmp_path, {"DATABASE_URL": postgres_url})
    committed, rolled_back = re.findall(r"^(?:committed|rolled back) (\S+)$", output, re.MULTILINE)
    assert re.findall(rf"^{committed} +order\.ship", output, re.MULTILINE)
    assert re.findall(rf"^{rolled_back} +order\.ship", output, re.MULTILINE) == []
    assert output.endswith("COMMIT order-7\nROLLBACK order-8\norder-7\n")


@pytest.mark.parametrize("page", STATED)
def test_the_guide_to_a_feature_states_the_bounds_and_leads_somewhere(page: str):
    text = " ".join((FOLDER / page).read_text(encoding="utf-8").split())
    assert [phrase for phrase in STATED[page] if phrase not in text] == []
    assert [target for target in LINK.findall(text) if not (FOLDER / target).exists()] == []
