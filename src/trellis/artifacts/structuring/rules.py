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
    Rule,
    pattern,
)
from trellis.artifacts.structuring.fields import is_empty, value_at
from trellis.artifacts.structuring.targets import Kind, Names
from trellis.artifacts.structuring.wording import clipped, say
from trellis.nlm.provider import Language

SHOWN_CHARS_MAX = 300
_SOURCE_KINDS = frozenset({Kind.SOURCE, Kind.MEMORY, Kind.NEW, Kind.DEFINITION})


def broken(rule: Rule, draft: Mapping[str, Any], names: Names, language: Language) -> Issue | None:
    """What is wrong by one rule; None when it holds. A field that is not there breaks only `required`."""
    value = value_at(draft, rule.field)
    message = _message(rule, value, draft.get("action"), names, language)
    return Issue(field=rule.field, severity=rule.severity, message=message) if message else None


def _message(rule: Rule, value: object, action: object, names: Names, language: Language) -> str | None:
    if is_empty(value) and not isinstance(rule, RequiredRule):
        return None
    return None if _holds(rule, value, action, names) else _complaint(rule, value, language)


def _holds(rule: Rule, value: object, action: object, names: Names) -> bool:
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


def _complaint(rule: Rule, value: object, language: Language) -> str:
    match rule:
        case RequiredRule():
            return say(language, "rule_required")
        case MaxCharsRule():
            return say(language, "rule_max_chars", limit=rule.value, size=len(str(value)))
        case MatchesRule():
            return say(language, "rule_matches", pattern=rule.value)
        case OneOfRule():
            return say(language, "rule_one_of", choices=clipped(", ".join(map(str, rule.value)), SHOWN_CHARS_MAX))
        case ResolvesRule():
            return say(language, "rule_resolves", kind=say(language, f"kind_{rule.value}"))


def _matches(wanted: str, value: object) -> bool:
    try:
        pattern(wanted).validate_python(value, strict=True)
    except pydantic.ValidationError:
        return False
    return True


def _resolves(to: ResolvesTo, value: str, action: object, names: Names) -> bool:
    found = names.resolve(value, action)
    if len(found) != 1:
        return False
    match to:
        case ResolvesTo.SOURCE:
            return found[0].kind in _SOURCE_KINDS
        case ResolvesTo.ENTITY:
            return found[0].kind is Kind.ENTITY
        case ResolvesTo.ANY:
            return True
