"""Prompts and output of the artifact commands, for a ledger and for a gateway."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from trellis.artifacts.content import ArtifactType
from trellis.cli.invocation import Cli
from trellis.engine.errors import InputError, OptionInvalid
from trellis.operations.explain import counted
from trellis.storage.objects.canonical_json import sha256


def print_discarded(cli: Cli, artifact_id: str) -> None:
    """Report that an artifact was discarded."""
    if cli.out.as_json:
        cli.out.record({"artifact_id": artifact_id, "status": "discarded"})
    else:
        cli.out.line(f"{artifact_id} discarded")


def write_download(cli: Cli, artifact_id: str, body: bytes, output: Path | None) -> None:
    """Write the bytes of an artifact to a file or to standard output, and report their SHA-256."""
    if output is not None:
        try:
            output.write_bytes(body)
        except OSError as error:
            expected = f"it cannot be written ({error.strerror}); name a file in a folder that you may write"
            raise OptionInvalid(option="--output", value=str(output), expected=expected) from None
    digest = sha256(body)
    if cli.out.as_json:
        file = None if output is None else str(output)
        cli.out.record({"artifact_id": artifact_id, "sha256": digest, "size": len(body), "file": file})
        return
    if output is None:
        cli.out.raw(body)
    cli.out.note(f"sha256 {digest}, {len(body)} bytes" + (f", in {output}" if output else ""))


def print_cleanup(cli: Cli, ids: Sequence[str], *, days: int, dry_run: bool, more: bool) -> None:
    """Report what a cleanup removed, or would remove."""
    if cli.out.as_json:
        cli.out.record({"older_than_days": days, "dry_run": dry_run, "artifacts": list(ids), "more": more})
        return
    for artifact_id in ids:
        cli.out.line(artifact_id)
    would = "would be removed" if dry_run else "removed"
    cli.out.line(f"{counted(len(ids), 'artifact')} older than {counted(days, 'day')} {would}")
    if ids and not dry_run:
        cli.out.note("their bytes are deleted when that is recorded: `trellis up` does both")
    if more:
        cli.out.note("there are more: ask again, or with a higher --limit")


def show_page(cli: Cli, document: dict[str, Any]) -> None:
    """Print an artifact as a page, or with --json as the whole document."""
    if cli.out.as_json:
        cli.out.record(document)
        return
    content: dict[str, Any] = document["content"]
    cli.out.line(content.get("title") or "Preprocessed proposal", style="bold")
    about = f"{document['type']} of {document['agent_slug']}, {document['finalized_at']}, job {document['job_id']}"
    cli.out.prose(about, style="dim")
    for line in _PAGES[ArtifactType(document["type"])](content):
        cli.out.prose(line)
    cli.out.line()
    cli.out.prose(f"{counted(len(document['sources']), 'quotation')} of its sources: --json shows them", style="dim")


def _research(content: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", content["summary"])
    for section in content["sections"]:
        refs = f"  ({', '.join(section['sources'])})" if section["sources"] else ""
        yield from ("", f"## {section['heading']}", f"{section['body']}{refs}")
    yield from _points("Conclusions", content["conclusions"])
    yield from _points("Open questions", content["open_questions"])


def _brief(content: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", content["body"])
    yield from _points("Entities", [f"{slug}: {name}" for slug, name in content["entity_map"].items()])
    yield from ("", counted(content["word_count"], "word"))


def _proposal(content: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", json.dumps(content["original"], ensure_ascii=False, indent=2))
    issues = [f"{issue['severity']}: {issue['field']}: {issue['message']}" for issue in content["issues"]]
    yield from _points("Issues", issues or ["none"])
    matches = [
        f"{match['text']!r} is {match['entity_id']} ({match['confidence']:.0%})" for match in content["entity_matches"]
    ]
    yield from _points("Entities it names", matches or ["none"])


def _points(title: str, points: Sequence[str]) -> Iterator[str]:
    if points:
        yield from ("", f"## {title}", *(f"- {point}" for point in points))


_PAGES = {
    ArtifactType.RESEARCH_BRIEF: _research,
    ArtifactType.BRIEF: _brief,
    ArtifactType.PREPROCESSED_PROPOSAL: _proposal,
}


def confirm(count: int, *, yes: bool) -> None:
    """Ask for confirmation before a permanent removal; raises InputError if there is no terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(
            detail=f"{counted(count, 'artifact')} would be removed: say --yes to do it, --dry-run to see them."
        )
    typer.confirm(f"Remove {counted(count, 'artifact')} for good?", abort=True, err=True)


def artifact_type(text: str | None) -> ArtifactType | None:
    """Parse an artifact type; raises OptionInvalid."""
    if text is None:
        return None
    try:
        return ArtifactType(text.upper())
    except ValueError:
        known = ", ".join(kind.value for kind in ArtifactType)
        raise OptionInvalid(option="--type", value=text, expected=f"one of {known}") from None


def check_days(days: int | None) -> None:
    """Validate a number of days; raises OptionInvalid."""
    if days is not None and days < 1:
        raise OptionInvalid(option="--older-than-days", value=days, expected="1 or more")
