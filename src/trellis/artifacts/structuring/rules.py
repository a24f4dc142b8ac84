"""Whether a draft keeps the rules that came with it: a pure decision, one issue for each rule that does not hold."""

from collections.abc import Mapping
from typing import Any

import pydantic

from trellis.artifacts.content import Issue
from trellis.artifacts.payloads import (
    MatchesRule,
    MaxCharsRule,
    OneOfRule,
    RequiredRule,
    ResolvesRule,
    ResolvesTo,
    ValidationRule,
    pattern,
)
from trellis.artifacts.structuring.fields import is_empty, value_at
from trellis.artifacts.structuring.targets import TargetKind, TargetResolver
from trellis.artifacts.structuring.wording import clipped, filled_sentence
from trellis.nlm.provider import Language

SHOWN_CHARS_MAX = 300
_SOURCE_KINDS = frozenset({TargetKind.SOURCE, TargetKind.MEMORY, TargetKind.NEW, TargetKind.DEFINITION})


def rule_violation(
    rule: ValidationRule, draft: Mapping[str, Any], names: TargetResolver, language: Language
) -> Issue | None:
    """What is wrong by one rule; None when it holds. A field that is not there breaks only `required`."""
    value = value_at(draft, rule.field)
    message = _message(rule, value, draft.get("action"), names, language)
    return Issue(field=rule.field, severity=rule.severity, message=message) if message else None


def _message(
    rule: ValidationRule, value: object, action: object, names: TargetResolver, language: Language
) -> str | None:
    if is_empty(value) and not isinstance(rule, RequiredRule):
        return None
    return None if _holds(rule, value, action, names) else _complaint(rule, value, language)


def _holds(rule: ValidationRule, value: object, action: object, names: TargetResolver) -> bool:
    match rule:
        case RequiredRule():
            return not is_empty(value)
        case MaxCharsRule():
            return not isinstance(value, str) or len(value) <= rule.value
        case MatchesRule():
            return _matches(rule.value, value)
        case OneOfRule():
            return any(type(value) is type(choice) and value == choice for choice in rule.value)
        case ResolvesRule():
            return isinstance(value, str) and _resolves(rule.value, value, action, names)


def _complaint(rule: ValidationRule, value: object, language: Language) -> str:
    match rule:
        case RequiredRule():
            return filled_sentence(language, "rule_required")
        case MaxCharsRule():
            return filled_sentence(language, "rule_max_chars", limit=rule.value, size=len(str(value)))
        case MatchesRule():
            return filled_sentence(language, "rule_matches", pattern=rule.value)
        case OneOfRule():
            return filled_sentence(
                language, "rule_one_of", choices=clipped(", ".join(map(str, rule.value)), SHOWN_CHARS_MAX)
            )
        case ResolvesRule():
            return filled_sentence(language, "rule_resolves", kind=filled_sentence(language, f"kind_{rule.value}"))


def _matches(wanted: str, value: object) -> bool:
    try:
        pattern(wanted).validate_python(value, strict=True)
    except pydantic.ValidationError:
        return False
    return True


def _resolves(to: ResolvesTo, value: str, action: object, names: TargetResolver) -> bool:
    found = names.resolve(value, action)
    if len(found) != 1:
        return False
    match to:
        case ResolvesTo.SOURCE:
            return found[0].kind in _SOURCE_KINDS
        case ResolvesTo.ENTITY:
            return found[0].kind is TargetKind.ENTITY
        case ResolvesTo.ANY:
            return True
