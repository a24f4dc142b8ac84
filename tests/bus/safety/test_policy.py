"""Which requests a policy lets go: the first rule that fits decides, and nothing goes without one that allows it."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bus.safety.policies import policy, request, rule
from trellis.bus.safety import evaluation
from trellis.bus.safety.evaluation import decide, explain, matches_pattern
from trellis.bus.safety.policy import (
    ALLOW_ALL_POLICY,
    DELAY_S_DEFAULT,
    FILE_BYTES_MAX,
    DecisionKind,
    PolicyInvalid,
    SafetyPolicy,
    read_policy,
    read_policy_file,
)
from trellis.bus.topics import subject_matches

META: dict[str, Any] = {
    "actor_type": "human",
    "capability": "Deploy",
    "risk_tags": ["Destructive", "pii"],
    "requires": ["GPU"],
    "pack_id": "pack-1",
    "labels": {"stage": "two"},
}
FULL: dict[str, Any] = {
    "tenant_id": "acme",
    "principal_id": "iryna",
    "priority": "critical",
    "adapter_id": "browser",
    "labels": {"env": "prod"},
    "meta": META,
}


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize("kind", list(DecisionKind))
def test_a_rule_that_fits_gives_its_answer(kind: DecisionKind):
    more: dict[str, Any] = {
        DecisionKind.THROTTLE: {"delay_s": 3.5},
        DecisionKind.ALLOW_WITH_CONSTRAINTS: {"constraints": {"max_runtime_ms": 1000, "network_allowlist": []}},
    }.get(kind, {})
    made, asked = policy(rule("it", kind.value, reason="because", **more)), request()
    found = decide(made, asked)
    assert (found.kind, found.rule, found.reason) == (kind, "it", "because")
    assert (found.policy_hash, found.job_hash) == (made.hash, asked.hash)
    assert found.lets_go is (kind in {DecisionKind.ALLOW, DecisionKind.ALLOW_WITH_CONSTRAINTS})
    assert found.delay_s == (3.5 if kind is DecisionKind.THROTTLE else 0)
    limited = {"max_runtime_ms": 1000, "network_allowlist": []}
    assert found.constraints == (limited if kind is DecisionKind.ALLOW_WITH_CONSTRAINTS else {})


@pytest.mark.requirement("BUS-4")
def test_a_throttle_without_a_delay_has_a_default():
    assert decide(policy(rule("slow", "throttle")), request()).delay_s == DELAY_S_DEFAULT


@pytest.mark.requirement("BUS-4")
def test_the_first_rule_that_fits_decides():
    first, second = rule("first", "deny", {"topics": ["job.code.>"]}), rule("second", "allow")
    assert decide(policy(first, second), request()).rule == "first"
    assert decide(policy(second, first), request()).rule == "second"
    assert decide(policy(first, second), request("job.mail")).rule == "second"


@pytest.mark.requirement("BUS-4", "D53")
def test_job_that_no_policy_rule_matches_is_denied():
    found = decide(policy(rule("mail", "allow", {"topics": ["job.mail"]})), request())
    assert (found.kind, found.rule) == (DecisionKind.DENY, "default")


@pytest.mark.requirement("D53")
def test_an_embedded_instance_lets_jobs_go_and_nothing_else():
    assert [
        decide(ALLOW_ALL_POLICY, request(topic)).lets_go for topic in ("job.a", "job.a.b", "jobs.a", "sys.job.submit")
    ] == [
        True,
        True,
        False,
        False,
    ]


FITTING: list[tuple[dict[str, Any], bool]] = [
    ({"topics": ["job.code.lint"]}, True),
    ({"topics": ["job.*.lint"]}, True),
    ({"topics": ["job.mail", "job.>"]}, True),
    ({"topics": ["job.code"]}, False),
    ({"topics": ["*.code"]}, False),
    ({"tenants": ["acme"]}, True),
    ({"tenants": ["ac*"]}, True),
    ({"tenants": ["ACME"]}, False),
    ({"tenants": ["beta"]}, False),
    ({"principals": ["iry*a"]}, True),
    ({"principals": ["iry*b"]}, False),
    ({"actor_types": ["human"]}, True),
    ({"actor_types": ["service"]}, False),
    ({"capabilities": ["deploy"]}, True),
    ({"capabilities": ["dep"]}, False),
    ({"risk_tags": ["destructive"]}, True),
    ({"risk_tags": ["money", "PII"]}, True),
    ({"risk_tags": ["money"]}, False),
    ({"requires": ["gpu"]}, True),
    ({"requires": ["tpu"]}, False),
    ({"labels": {"env": "prod"}}, True),
    ({"labels": {"env": "p*", "stage": "two"}}, True),
    ({"labels": {"env": "prod", "other": "*"}}, False),
    ({"labels": {"env": "dev"}}, False),
    ({"priorities": ["critical"]}, True),
    ({"priorities": ["batch", "interactive"]}, False),
    ({"adapters": ["browser"]}, True),
    ({"adapters": ["shell"]}, False),
    ({"packs": ["pack-*"]}, True),
    ({"packs": ["other"]}, False),
    ({"topics": ["job.>"], "tenants": ["acme"], "risk_tags": ["pii"]}, True),
    ({"topics": ["job.>"], "tenants": ["acme"], "risk_tags": ["money"]}, False),
]


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize("match, does", FITTING)
def test_a_rule_fits_when_every_condition_does(match: dict[str, Any], does: bool):
    assert decide(policy(rule("it", "allow", match)), request(**FULL)).lets_go is does


@pytest.mark.parametrize(
    "match", [match for match, does in FITTING if does and set(match) - {"topics"} and "priorities" not in match]
)
def test_condition_on_a_missing_field_does_not_match(match: dict[str, Any]):
    assert not decide(policy(rule("it", "allow", match)), request()).lets_go


def test_a_job_without_a_priority_is_a_batch_job():
    assert decide(policy(rule("it", "allow", {"priorities": ["batch"]})), request()).lets_go


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize(
    "fields, says",
    [
        ({"tenant_id": "acme", "meta": {"tenant_id": "beta"}}, "tenant_id is 'acme' and meta.tenant_id is 'beta'"),
        ({"labels": {"env": "dev"}, "meta": {"labels": {"env": "prod"}}}, "the label 'env'"),
    ],
)
def test_request_with_contradicting_fields_is_denied_despite_the_rules(fields: dict[str, Any], says: str):
    found = explain(policy(rule("all", "allow")), request(**fields))
    assert (found.decision.kind, found.decision.rule) == (DecisionKind.DENY, "ambiguous")
    assert says in found.decision.reason


def test_tenant_is_read_from_the_request_or_its_metadata():
    made = policy(rule("it", "allow", {"tenants": ["acme"]}))
    assert decide(made, request(meta={"tenant_id": "acme"})).lets_go
    assert decide(made, request(tenant_id="acme", meta={"tenant_id": "acme"})).lets_go


# --- explaining ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-4")
def test_an_explanation_names_every_rule_that_was_looked_at_and_why_it_did_not_fit():
    made = policy(
        rule("mail", "deny", {"topics": ["job.mail.*"]}),
        rule("beta", "deny", {"tenants": ["beta"]}),
        rule("tagged", "deny", {"labels": {"env": "dev"}}),
        rule("code", "allow", {"topics": ["job.code.>"], "tenants": ["acme"]}),
        rule("rest", "deny"),
    )
    found = explain(made, request(**FULL))
    assert [(one.rule, one.fits) for one in found.looked] == [
        ("mail", False),
        ("beta", False),
        ("tagged", False),
        ("code", True),
    ]
    assert [one.why for one in found.looked] == [
        "topics: job.code.lint matches none of job.mail.*",
        "tenants: acme matches none of beta",
        "labels: env is 'prod' and should be like 'dev'",
        "tenants, topics fit",
    ]
    assert found.not_looked == ("rest",)
    assert found.to_dict()["rule"] == "code"


# --- hashes --------------------------------------------------------------------------------------------------------------

ONE = '[[rules]]\nid = "a"\ndecision = "allow"\nmatch = { topics = ["job.a"] }\n'
TWO = '# the same\n[[rules]]\nmatch.topics = [\n "job.a",\n]\ndecision = "allow"\nid = "a"\n'


@pytest.mark.requirement("D45")
def test_the_hash_is_of_the_rules_and_not_of_how_they_are_written():
    assert read_policy(ONE, source="one").hash == read_policy(TWO, source="two").hash
    rules = [rule("a", "allow", {"topics": ["job.a"]}), rule("b", "deny")]
    hashes = {
        policy(*rules).hash,
        policy(*reversed(rules)).hash,
        policy(rules[0]).hash,
        policy(rule("a", "deny", {"topics": ["job.a"]}), rules[1]).hash,
        policy(rule("a", "allow", {"topics": ["job.a"], "tenants": ["x"]}), rules[1]).hash,
    }
    assert len(hashes) == 5


# --- hostile files -------------------------------------------------------------------------------------------------------

BOUNDED = ONE.replace('"allow"', '"allow_with_constraints"')
BAD: list[tuple[str, str]] = [
    ("", "rules: Field required"),
    ("rules = []", "rules: "),
    ('rules = "all"', "rules: it must be a list"),
    ('default = "allow"\n' + ONE, "default: there is no such field"),
    (ONE + ONE, "rules.0 and rules.1 both have the id 'a'"),
    (ONE.replace('"allow"', '"permit"'), "rules.0.decision: "),
    (ONE.replace('"allow"', "1"), "rules.0.decision: "),
    (ONE.replace('id = "a"', 'id = "A b"'), "rules.0.id: "),
    (ONE.replace('id = "a"', 'id = "default"'), "the id 'default' is kept"),
    (ONE.replace('id = "a"\n', ""), "rules.0.id: Field required"),
    (ONE.replace("topics", "topic"), "rules.0.match.topic: there is no such field (did you mean topics?)"),
    (ONE.replace('match = { topics = ["job.a"] }', ""), "rules.0.match: Field required"),
    (ONE.replace('{ topics = ["job.a"] }', "{}"), "it names no condition"),
    (ONE.replace('["job.a"]', "[]"), "rules.0.match.topics: "),
    (ONE.replace('["job.a"]', '"job.a"'), "rules.0.match.topics: "),
    (ONE.replace("job.a", "job.>.a"), "rules.0.match.topics.0: 'job.>.a' is no pattern of topics"),
    (ONE.replace("job.a", "job..a"), "is no pattern of topics"),
    (ONE.replace("job.a", "job.a*"), "is no pattern of topics"),
    (ONE.replace("job.a", "job.a b"), "is no pattern of topics"),
    (ONE.replace("job.a", "job.\\u0000"), "is no pattern of topics"),
    (ONE.replace('topics = ["job.a"]', 'tenants = ["a?b"]'), "rules.0.match.tenants.0: 'a?b' holds '?'"),
    (ONE.replace('topics = ["job.a"]', 'tenants = ["[ab]"]'), "only * stands for something else"),
    (ONE.replace('topics = ["job.a"]', "labels = {}"), "rules.0.match.labels: "),
    (ONE.replace('topics = ["job.a"]', 'labels = { env = ["a"] }'), "rules.0.match.labels.env: "),
    (ONE.replace('topics = ["job.a"]', 'actor_types = ["robot"]'), "rules.0.match.actor_types.0: "),
    (ONE.replace('topics = ["job.a"]', 'priorities = ["high"]'), "rules.0.match.priorities.0: "),
    (ONE + "delay_s = 5", "delay_s belongs to a throttle"),
    (ONE.replace('"allow"', '"throttle"') + "delay_s = 0", "rules.0.delay_s: "),
    (ONE.replace('"allow"', '"throttle"') + "delay_s = inf", "rules.0.delay_s: "),
    (ONE.replace('"allow"', '"throttle"') + "delay_s = nan", "rules.0.delay_s: "),
    (ONE.replace('"allow"', '"throttle"') + 'delay_s = "5"', "rules.0.delay_s: "),
    (ONE + "constraints = { max_runtime_ms = 5 }", "constraints belong to allow_with_constraints"),
    (ONE.replace('"allow"', '"allow_with_constraints"'), "names no constraints"),
    (ONE.replace('"allow"', '"allow_with_constraints"') + "constraints = { cpu = 5 }", "rules.0.constraints.cpu: "),
    (
        ONE.replace('"allow"', '"allow_with_constraints"') + "constraints = { max_runtime_ms = 0 }",
        "rules.0.constraints.max_runtime_ms: ",
    ),
    (
        ONE.replace('"allow"', '"allow_with_constraints"') + "constraints = { max_runtime_ms = true }",
        "rules.0.constraints.max_runtime_ms: ",
    ),
    (
        BOUNDED + f"constraints = {{ allowed_tools = {['t' * 30] * 60} }}",
        "rules.0.constraints: they take 2059 characters as JSON and a worker is told at most 2000; write shorter lists",
    ),
    ("rules = [[", "it is no TOML"),
    (ONE + ONE.replace('id = "a"', 'id = "b"\nid = "c"'), "it is no TOML"),
    ("x = " + "9" * 10_000, "it is no TOML"),
    ("x = " + "[" * 50_000, "nested too deeply"),
    ("#" * (FILE_BYTES_MAX + 1), "more than"),
]


@pytest.mark.requirement("BUS-4")
@pytest.mark.parametrize("text, says", BAD, ids=[str(number) for number in range(len(BAD))])
def test_invalid_policy_is_refused_with_the_path_of_the_field(text: str, says: str):
    with pytest.raises(PolicyInvalid, match=re.escape(says)) as refusal:
        read_policy(text, source="policy.toml")
    assert "policy.toml" in str(refusal.value)


def test_a_refusal_names_what_is_wrong_and_not_what_follows_from_it():
    with pytest.raises(PolicyInvalid) as refusal:
        read_policy(ONE.replace("job.a", "job..a"), source="policy.toml")
    assert str(refusal.value).endswith(": '' must be a word, * for any one, or > at the end")


def test_a_mark_that_an_editor_put_before_the_text_changes_nothing(tmp_path: Path):
    (tmp_path / "policy.toml").write_text(ONE, encoding="utf-8-sig")
    assert read_policy_file(tmp_path / "policy.toml").hash == read_policy(ONE, source="here").hash


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(PolicyInvalid, match="cannot be read"):
        read_policy_file(tmp_path / "missing.toml")
    with pytest.raises(PolicyInvalid, match="cannot be read"):
        read_policy_file(tmp_path)
    (tmp_path / "policy.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyInvalid, match="not UTF-8"):
        read_policy_file(tmp_path / "policy.toml")


@pytest.mark.parametrize("pattern", ["*" * 200, "a*" * 100, "*a" * 100 + "b"])
def test_no_topic_pattern_is_slow_to_match(pattern: str):
    matches_pattern(pattern, "a" * 2_000)


# --- properties ----------------------------------------------------------------------------------------------------------

WORDS = st.sampled_from(["job", "code", "mail", "*", ">", "x"])
NAMES = st.sampled_from(["acme", "beta", "a*", "*", "pii", "PII", "gpu"])
SAID = st.sampled_from(["", "acme", "beta", "pii", "gpu"])
MATCHES = st.fixed_dictionaries(
    {},
    optional={
        "topics": st.lists(st.lists(WORDS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=3),
        "tenants": st.lists(NAMES, min_size=1, max_size=3),
        "principals": st.lists(NAMES, min_size=1, max_size=3),
        "risk_tags": st.lists(NAMES, min_size=1, max_size=3),
        "requires": st.lists(NAMES, min_size=1, max_size=3),
        "labels": st.dictionaries(st.sampled_from(["env", "stage"]), NAMES, min_size=1, max_size=2),
    },
)
RULES = st.lists(
    st.tuples(
        st.sampled_from([kind.value for kind in DecisionKind if kind is not DecisionKind.ALLOW_WITH_CONSTRAINTS]),
        MATCHES,
    ),
    min_size=1,
    max_size=6,
)
REQUESTS = st.fixed_dictionaries(
    {"topic": st.lists(st.sampled_from(["job", "code", "mail", "x"]), min_size=1, max_size=4).map(".".join)},
    optional={
        "tenant_id": SAID,
        "principal_id": SAID,
        "labels": st.dictionaries(st.sampled_from(["env", "stage"]), SAID, max_size=2),
        "meta": st.fixed_dictionaries(
            {}, optional={"risk_tags": st.lists(SAID, max_size=2), "requires": st.lists(SAID, max_size=2)}
        ),
    },
)


def read_or_none(rules: list[tuple[str, dict[str, Any]]]) -> SafetyPolicy | None:
    try:
        return policy(*({"id": f"r{n}", "decision": kind, "match": match} for n, (kind, match) in enumerate(rules)))
    except ValueError:
        return None


def simply_fits(match: dict[str, Any], told: dict[str, Any]) -> bool:
    """The same once more, without regard to speed or to words: by regular expressions over small texts."""

    def like(pattern: str, value: str, flags: int = 0) -> bool:
        return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), value, flags) is not None

    meta = told.get("meta", {})
    known = {
        "topics": lambda pattern: subject_matches(pattern, told["topic"]),
        "tenants": lambda pattern: bool(told.get("tenant_id")) and like(pattern, told["tenant_id"]),
        "principals": lambda pattern: bool(told.get("principal_id")) and like(pattern, told["principal_id"]),
        "risk_tags": lambda pattern: any(like(pattern, tag, re.IGNORECASE) for tag in meta.get("risk_tags", ())),
        "requires": lambda pattern: any(like(pattern, need, re.IGNORECASE) for need in meta.get("requires", ())),
    }
    labels = told.get("labels", {})
    return all(any(known[name](pattern) for pattern in match[name]) for name in known if name in match) and all(
        name in labels and like(pattern, labels[name]) for name, pattern in match.get("labels", {}).items()
    )


@pytest.mark.requirement("BUS-4")
@settings(max_examples=150, deadline=None)
@given(rules=RULES, told=REQUESTS)
def test_no_request_goes_without_a_rule_that_allows_it_and_fits(
    rules: list[tuple[str, dict[str, Any]]], told: dict[str, Any]
):
    made = read_or_none(rules)
    if made is None:
        return
    found = decide(made, request(**told))
    first = next((kind for kind, match in rules if simply_fits(match, told)), DecisionKind.DENY.value)
    assert found.kind.value == first
    assert not found.lets_go or any(kind == "allow" and simply_fits(match, told) for kind, match in rules)


def test_request_with_a_thousand_values_is_matched_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
):
    looked = list[str]()

    def counted(pattern: str, value: str) -> bool:
        looked.append(pattern)
        return matches_pattern(pattern, value)

    monkeypatch.setattr(evaluation, "matches_pattern", counted)
    rules = [rule(f"r{number}", "deny", {"risk_tags": [f"*-{number}-*"]}) for number in range(100)]
    asked = request(meta={"risk_tags": [f"tag-{number}" for number in range(999)] + ["A-42-B"]})
    assert decide(policy(*rules), asked).rule == "r42"
    assert set(looked) == {"*-42-*"}


def test_a_policy_that_would_take_too_long_to_ask_is_refused():
    patterns = [f"*{number}" for number in range(1_000)]
    rules = [rule(f"r{number}", "deny", {"risk_tags": patterns}) for number in range(10)]
    assert len(policy(*rules).rules) == 10
    with pytest.raises(ValueError, match="10001 patterns and the limit is 10000"):
        policy(*rules, rule("last", "deny"))
