"""The normal form hides times and ids, and nothing else."""

import re
from dataclasses import replace
from pathlib import Path

from tests.faults.fleet import Nursery
from tests.runs.processes.normal import Left, normal
from tests.runs.processes.stories import a_story

CHANGES_MAX = 10
DIGEST = re.compile(rb'"sha256": "[0-9a-f]{64}"')


async def left_by_a_run(template: Path, folder: Path, nursery: Nursery) -> Left:
    async with a_story(template, folder, nursery) as story:
        await story.begin()
        story.fleet.start(1)
        await story.finish()
        return await story.left()


def changed(left: Left, key: str, body: bytes) -> Left:
    return replace(left, files={**left.files, key: body})


def letters(body: bytes) -> list[int]:
    """Places of some lower-case letters, spread over the file."""
    found = [at for at, letter in enumerate(body) if 103 <= letter <= 122]
    return found[:: 1 + len(found) // CHANGES_MAX]


async def test_the_normal_form_hides_times_and_ids_and_nothing_else(
    template: Path, orchestrators: Nursery, tmp_path: Path
):
    one, two = [await left_by_a_run(template, tmp_path / name, orchestrators) for name in ("one", "two")]
    assert one.run_id != two.run_id
    assert one.files != two.files
    form = normal(one)
    assert normal(two) == form
    for key, body in one.files.items():
        for at in letters(body):
            other = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            assert normal(changed(one, key, other)) != form, f"{key}: {body[max(0, at - 20) : at + 20]!r}"
        assert normal(changed(one, key, body + b" ")) != form
        assert normal(replace(one, files={k: v for k, v in one.files.items() if k != key})) != form
    manifest = next(key for key in one.files if key.endswith("manifest.json"))
    wrong = DIGEST.sub(b'"sha256": "' + b"0" * 64 + b'"', one.files[manifest], count=1)
    assert normal(changed(one, manifest, wrong)) != form, "a wrong digest is hidden"
    swapped = replace(one, proposals=[one.proposals[1], one.proposals[0], *one.proposals[2:]])
    assert normal(swapped) != form, "proposals in another order are hidden"
    assert normal(replace(one, commits=[*one.commits, "0" * 40])) != form, "a second commit is hidden"
    again = {**one.events, one.run_id: [*one.events[one.run_id], one.events[one.run_id][-1]]}
    assert normal(replace(one, events=again)) != form, "a second event is hidden"
