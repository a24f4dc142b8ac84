"""The pictures show every state and every transition, and nothing lies on anything else."""

from collections import Counter
from dataclasses import replace
from html import unescape
from itertools import combinations, pairwise
from xml.etree import ElementTree as ET

import pytest

from tests.lifecycles.documents import TABLES, places
from trellis.lifecycles import LIFECYCLES, Lifecycle, Opens, Role, Trigger
from trellis.lifecycles.layout import Box, layout, spine_of
from trellis.lifecycles.lifecycle import arrow, waiting
from trellis.lifecycles.mermaid import mermaid
from trellis.lifecycles.svg import svg

SVG = "{http://www.w3.org/2000/svg}"
every_lifecycle = pytest.mark.parametrize("lifecycle", LIFECYCLES.values(), ids=list(LIFECYCLES))
Rect = tuple[float, float, float, float]


def words(picture: str) -> Counter[str]:
    """Every word of every text of an SVG."""
    texts = ET.fromstring(picture).iter(f"{SVG}text")
    return Counter(word.strip(",†") for text in texts for word in "".join(text.itertext()).split())


@every_lifecycle
def test_the_picture_names_every_state_trigger_and_role(lifecycle: Lifecycle):
    shown = words(svg(lifecycle))
    table = TABLES[lifecycle.name]
    missing = {place.name for place in places(lifecycle.name)} - set(shown)
    missing |= {row.trigger for row in table} - set(shown)
    missing |= {role for row in table for role in row.roles} - set(shown)
    assert missing == set()


@every_lifecycle
def test_the_picture_has_one_arrow_for_each_pair_of_states(lifecycle: Lifecycle):
    drawn = Counter((a.source, a.target) for a in layout(lifecycle).arrows)
    assert drawn == Counter({(row.source, row.target) for row in TABLES[lifecycle.name]})
    for a in layout(lifecycle).arrows:
        told = " ".join(line.triggers for line in a.label.lines).replace(",", "").split()
        declared = [r for r in TABLES[lifecycle.name] if (r.source, r.target) == (a.source, a.target)]
        expected = {r.trigger + ("" if r.origin == "doc" else "†") for r in declared}
        assert set(told) == expected


@every_lifecycle
def test_arrows_begin_at_their_source_and_end_at_their_target(lifecycle: Lifecycle):
    plan = layout(lifecycle)
    boxes = {box.state.name: box for box in plan.boxes}
    for a in plan.arrows:
        assert on_edge(a.points[-1], boxes[a.target])
        assert a.source is None or on_edge(a.points[0], boxes[a.source])
        assert all(p[0] == q[0] or p[1] == q[1] for p, q in pairwise(a.points)), "lines are level or upright"


def on_edge(point: tuple[float, float], box: Box) -> bool:
    x, y = point
    across = y in {box.y, box.bottom} and box.x < x < box.right
    return across or (x in {box.x, box.right} and box.y < y < box.bottom)


@every_lifecycle
def test_no_label_lies_on_a_box_or_on_another_label(lifecycle: Lifecycle):
    plan = layout(lifecycle)
    labels = sorted({a.label.box for a in plan.arrows})
    boxes = [rect(box) for box in plan.boxes]
    assert [pair for pair in combinations(labels, 2) if overlap(*pair)] == []
    assert [(label, box) for label in labels for box in boxes if overlap(label, box)] == []
    assert [pair for pair in combinations(boxes, 2) if overlap(*pair)] == []


@every_lifecycle
def test_no_line_runs_through_a_box_or_a_label(lifecycle: Lifecycle):
    plan = layout(lifecycle)
    pieces = [(p, q) for a in plan.arrows for p, q in pairwise(a.points)]
    inner = [shrunk(rect(box), 1) for box in plan.boxes]
    labels = [shrunk(a.label.box, 2) for a in plan.arrows]
    crossed = [(piece, area) for piece in pieces for area in (*inner, *labels) if overlap(line_rect(*piece), area)]
    assert crossed == []


@every_lifecycle
def test_everything_is_inside_the_page(lifecycle: Lifecycle):
    plan = layout(lifecycle)
    root = ET.fromstring(svg(lifecycle))
    page: Rect = (0, 0, float(root.attrib["width"]), float(root.attrib["height"]))
    areas = [*(rect(box) for box in plan.boxes), *(a.label.box for a in plan.arrows)]
    areas += [line_rect(p, q) for a in plan.arrows for p, q in pairwise(a.points)]
    assert [a for a in areas if a[0] < page[0] or a[1] < page[1] or a[2] > page[2] or a[3] > page[3]] == []


@every_lifecycle
def test_rows_are_ranks(lifecycle: Lifecycle):
    tops = {(box.state.rank, box.y) for box in layout(lifecycle).boxes}
    ordered = sorted(tops)
    assert len({rank for rank, _ in tops}) == len(tops)
    assert ordered == sorted(tops, key=lambda pair: pair[1])


def rect(box: Box) -> Rect:
    return (box.x, box.y, box.right, box.bottom)


def line_rect(p: tuple[float, float], q: tuple[float, float]) -> Rect:
    return (min(p[0], q[0]), min(p[1], q[1]), max(p[0], q[0]), max(p[1], q[1]))


def shrunk(area: Rect, by: float) -> Rect:
    return (area[0] + by, area[1] + by, area[2] - by, area[3] - by)


def overlap(a: Rect, b: Rect) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def classes(picture: str, name: str) -> list[str]:
    return [item.attrib.get("class", "") for item in ET.fromstring(picture).iter(SVG + name)]


@every_lifecycle
def test_states_are_coloured_by_phase(lifecycle: Lifecycle):
    groups = ET.fromstring(svg(lifecycle)).iter(f"{SVG}g")
    shown = {group.attrib["id"]: group[0].attrib["class"].split()[1] for group in groups}
    assert shown == {f"{lifecycle.name}-{s.name}": "success" if s.success else s.phase.value for s in lifecycle.states}


def test_lines_show_what_they_open():
    drawn = {cls.split()[1] for cls in classes(svg(LIFECYCLES["leased-job"]), "path") if cls.startswith("line ")}
    assert drawn == {"same", "attempt", "generation"}
    drawn = {cls.split()[1] for cls in classes(svg(LIFECYCLES["run"]), "path") if cls.startswith("line ")}
    assert drawn == {"same"}


def test_the_legend_explains_what_the_picture_uses_and_no_more():
    leased, nlm = words(svg(LIFECYCLES["leased-job"])), words(svg(LIFECYCLES["nlm-job"]))
    assert {"attempt", "generation", "decision"} <= set(leased)
    assert not {"generation", "decision"} & set(nlm)


@pytest.mark.parametrize("state", ["running", "dead_lettered", "succeeded"])
def test_a_highlight_marks_the_state_and_what_may_follow(state: str):
    leased = LIFECYCLES["leased-job"]
    marked = svg(leased, highlight=state)
    follow = {(r.source, r.target) for r in TABLES["leased-job"] if r.source == state}
    assert sum("now" in cls.split() for cls in classes(marked, "path")) == len(follow)
    assert sum("now" in cls.split() for cls in classes(marked, "rect")) == 1
    assert not [cls for cls in classes(svg(leased), "path") + classes(svg(leased), "rect") if "now" in cls.split()]


def test_only_whole_arrows_have_heads_and_the_others_end_on_them_in_a_dot():
    picture = ET.fromstring(svg(LIFECYCLES["leased-job"]))
    lines = [path for path in picture.iter(f"{SVG}path") if path.attrib.get("class", "").startswith("line ")]
    heads = [path for path in lines if "marker-end" in path.attrib]
    ways = {(a.target, a.opens) for a in layout(LIFECYCLES["leased-job"]).arrows}
    arrows = {(a.source, a.target) for a in layout(LIFECYCLES["leased-job"]).arrows}
    # succeeded is entered by completing and by its own loop, which meet nowhere; so are submit and the ways back.
    assert len(heads) == len(ways) + 1
    dots = [circle for circle in picture.iter(f"{SVG}circle") if circle.attrib["r"] == "2.8"]
    assert len(heads) + len(dots) == len(arrows)


def test_two_pictures_on_one_page_share_no_id():
    ids = [
        item.attrib["id"]
        for life in LIFECYCLES.values()
        for item in ET.fromstring(svg(life)).iter()
        if "id" in item.attrib
    ]
    assert len(ids) == len(set(ids))


def test_text_from_a_table_is_escaped():
    odd = replace(LIFECYCLES["run"], title="a < b & c")
    assert "a &lt; b &amp; c" in svg(odd)
    assert ET.fromstring(svg(odd)).findtext(f"{SVG}title") == unescape("run: a &lt; b &amp; c")


def test_a_lifecycle_without_success_has_only_its_first_state_as_spine():
    endless = Lifecycle(
        name="endless",
        code=9,
        title="Waits for ever",
        swept_by=Role.SWEEPER,
        states=(waiting("a", 0), waiting("b", 1)),
        transitions=(
            arrow(None, "a", Trigger.SUBMIT, Role.SUBMITTER, "job_queued", "born"),
            arrow("a", "b", "on", Role.WORKER, "job_queued", "goes on"),
            arrow("b", "a", "back", Role.WORKER, "job_queued", "comes back", opens=Opens.ATTEMPT),
        ),
    )
    assert spine_of(endless) == ["a"]
    assert {box.state.name for box in layout(endless).boxes} == {"a", "b"}
    ET.fromstring(svg(endless))


# -- mermaid -----------------------------------------------------------------------------------------------------


@every_lifecycle
def test_mermaid_has_every_transition_with_its_roles(lifecycle: Lifecycle):
    lines = mermaid(lifecycle).splitlines()
    assert lines[0] == "stateDiagram-v2"
    arrows = dict(line.strip().split(" : ", 1) for line in lines if " : " in line)
    told = {(pair, label) for pair, labels in arrows.items() for label in labels.split("<br/>")}
    assert told == {
        (
            f"{row.source or '[*]'} --> {row.target}",
            f"{row.trigger}{'' if row.origin == 'doc' else '†'} ({', '.join(sorted(row.roles))})",
        )
        for row in TABLES[lifecycle.name]
    }


@every_lifecycle
def test_mermaid_colours_phases_and_ends_what_ends(lifecycle: Lifecycle):
    lines = [line.strip() for line in mermaid(lifecycle).splitlines()]
    by_phase = {line.split()[2]: set(line.split()[1].split(",")) for line in lines if line.startswith("class ")}
    there = {place.phase for place in places(lifecycle.name)}
    assert by_phase == {
        phase: {place.name for place in places(lifecycle.name) if place.phase == phase} for phase in there
    }
    ends = {line.split()[0] for line in lines if line.endswith("--> [*]")}
    assert ends == by_phase["ended"]
