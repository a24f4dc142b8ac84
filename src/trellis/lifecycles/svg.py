"""A lifecycle as an SVG picture: readable on light and dark pages, without any dependency."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from trellis.lifecycles.layout import (
    CHAR_W,
    EXTENSION_MARK,
    LINE_H,
    MARGIN,
    Arrow,
    Box,
    Label,
    Layout,
    Point,
    layout,
    phase_class,
)
from trellis.lifecycles.lifecycle import Lifecycle, Opens

CORNER = 9.0
FONT = "ui-sans-serif, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"
OPENS_CLASS = {Opens.SAME: "same", Opens.ATTEMPT: "attempt", Opens.GENERATION: "generation"}
HEADS = {"same": "head", "attempt": "attempt-head", "generation": "generation-head", "now": "now-head"}
WIDTH_MIN = 720.0
LEGEND_GAP = 34.0

LEGEND_STATES = (
    ("waiting", "waiting: nobody's"),
    ("held", "held: under a lease"),
    ("success", "ended well"),
    ("ended", "ended"),
)
LEGEND_LINES = (
    ("line same", "same attempt", Opens.SAME),
    ("line attempt", "opens the next attempt", Opens.ATTEMPT),
    ("line generation", "opens a new generation", Opens.GENERATION),
)

LIGHT = """
.trellis-lc .page{fill:#fff;stroke:#d8dee9}
.trellis-lc text{fill:#1f2937}
.trellis-lc .muted,.trellis-lc .subtitle{fill:#6b7280}
.trellis-lc .line{stroke:#64748b}
.trellis-lc .head{fill:#64748b}
.trellis-lc .waiting{fill:#fef3c7;stroke:#d97706}
.trellis-lc .held{fill:#dbeafe;stroke:#2563eb}
.trellis-lc .ended{fill:#eef0f4;stroke:#7c8798}
.trellis-lc .success{fill:#dcfce7;stroke:#16a34a}
.trellis-lc .attempt{stroke:#b45309}
.trellis-lc .generation{stroke:#9333ea}
.trellis-lc .attempt-head{fill:#b45309}
.trellis-lc .generation-head{fill:#9333ea}
.trellis-lc .now{stroke:#dc2626}
.trellis-lc .now-head{fill:#dc2626}
"""
DARK = """
.trellis-lc .page{fill:#12161d;stroke:#2b3340}
.trellis-lc text{fill:#e5e9f0}
.trellis-lc .muted,.trellis-lc .subtitle{fill:#9aa5b5}
.trellis-lc .line{stroke:#8b98ab}
.trellis-lc .head{fill:#8b98ab}
.trellis-lc .waiting{fill:#3b2f0c;stroke:#f0b429}
.trellis-lc .held{fill:#14294d;stroke:#60a5fa}
.trellis-lc .ended{fill:#252c37;stroke:#8b98ab}
.trellis-lc .success{fill:#0f3320;stroke:#4ade80}
.trellis-lc .attempt{stroke:#f59e0b}
.trellis-lc .generation{stroke:#c084fc}
.trellis-lc .attempt-head{fill:#f59e0b}
.trellis-lc .generation-head{fill:#c084fc}
.trellis-lc .now{stroke:#f87171}
.trellis-lc .now-head{fill:#f87171}
"""
SHAPES = f"""
.trellis-lc text{{font:11px {FONT}}}
.trellis-lc .title{{font-size:17px;font-weight:600}}
.trellis-lc .subtitle{{font-size:12px;font-weight:400}}
.trellis-lc .name{{font-size:13px;font-weight:600;text-anchor:middle}}
.trellis-lc .rank{{font-size:10px;text-anchor:middle}}
.trellis-lc .trigger{{font-weight:600}}
.trellis-lc .ends{{text-anchor:end}}
.trellis-lc .line{{fill:none;stroke-width:1.5}}
.trellis-lc .attempt{{stroke-dasharray:6 4}}
.trellis-lc .generation{{stroke-dasharray:2 4;stroke-linecap:round;stroke-width:2}}
.trellis-lc .state{{stroke-width:1.6}}
.trellis-lc .inner{{fill:none;stroke-width:1;opacity:.55}}
.trellis-lc .now{{stroke-width:3}}
"""


def svg(lifecycle: Lifecycle, highlight: str | None = None) -> str:
    """The picture of a lifecycle; `highlight` names the state a job is in, and marks what may follow."""
    plan = layout(lifecycle)
    width = max(plan.width, WIDTH_MIN)
    legend, legend_h = _legend(lifecycle, width, plan.height + LEGEND_GAP)
    parts = [
        *_frame(lifecycle, width, plan.height + LEGEND_GAP + legend_h),
        *_drawn(lifecycle, plan, highlight),
        *legend,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _frame(lifecycle: Lifecycle, width: float, height: float) -> Iterable[str]:
    name, title = escape(lifecycle.name), escape(lifecycle.title)
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" class="trellis-lc" role="img" {size} aria-label="Lifecycle {name}">'
    yield f"<title>{name}: {title}</title>"
    yield f"<style>{_style()}</style>"
    yield _markers(lifecycle)
    yield f'<rect class="page" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="12"/>'
    yield f'<text class="title" x="{MARGIN:.0f}" y="34">{name}<tspan class="subtitle" dx="12">{title}</tspan></text>'


def _style() -> str:
    text = f"{SHAPES}{LIGHT}@media (prefers-color-scheme: dark){{{DARK}}}"
    return text.replace("\n", "")


def _drawn(lifecycle: Lifecycle, plan: Layout, highlight: str | None) -> Iterable[str]:
    """Lines below, boxes over them, words on top."""
    for arrow, points in _joined(plan.arrows):
        yield _line(lifecycle, arrow, points)
    for arrow in plan.arrows:
        if highlight is not None and arrow.source == highlight:
            yield _line(lifecycle, arrow, arrow.points, now=True)
    start = plan.arrows[0].points[0]
    yield f'<circle class="head" cx="{start[0]:.1f}" cy="{start[1]:.1f}" r="4.5"/>'
    for box in plan.boxes:
        yield _box(lifecycle, box, now=box.state.name == highlight)
    seen: set[Label] = set()
    for arrow in plan.arrows:
        if arrow.label not in seen:
            seen.add(arrow.label)
            yield from _label(arrow.label)


def _markers(lifecycle: Lifecycle) -> str:
    return "".join(
        (
            "<defs>",
            *(
                f'<marker id="{lifecycle.name}-{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="10"'
                f' markerHeight="10" markerUnits="userSpaceOnUse" orient="auto"><path class="{head}" d="M0 1 10 5 0 9z"/></marker>'
                for name, head in HEADS.items()
            ),
            "</defs>",
        )
    )


def _joined(arrows: Iterable[Arrow]) -> Iterable[tuple[Arrow, tuple[Point, ...]]]:
    """Arrows to one target share a trunk: the longest is drawn whole, the others as far as they meet it.

    Two dashed lines on one another would look like a solid one.
    """
    drawn: dict[tuple[str, Opens], list[tuple[Point, Point]]] = defaultdict(list)
    for arrow in sorted(arrows, key=lambda a: -sum(map(_length, pairwise(a.points)))):
        trunk = drawn[arrow.target, arrow.opens]
        meets = (n for n, point in enumerate(arrow.points) if any(_on(point, piece) for piece in trunk))
        points = arrow.points[: next(meets, len(arrow.points)) + 1]
        trunk.extend(pairwise(points))
        yield arrow, points


def _length(piece: tuple[Point, Point]) -> float:
    (x1, y1), (x2, y2) = piece
    return abs(x1 - x2) + abs(y1 - y2)


def _on(point: Point, piece: tuple[Point, Point]) -> bool:
    """Whether a point lies on a piece of a line; every piece is level or upright."""
    (x, y), ((x1, y1), (x2, y2)) = point, piece
    return min(x1, x2) <= x <= max(x1, x2) and min(y1, y2) <= y <= max(y1, y2)


def _line(lifecycle: Lifecycle, arrow: Arrow, points: Sequence[Point], *, now: bool = False) -> str:
    """A whole arrow has a head; one that joins another ends in a dot, which tells joining from crossing."""
    kind = OPENS_CLASS[arrow.opens]
    path = f'<path class="line {kind}{" now" if now else ""}" d="{_rounded(points)}"'
    if points[-1] == arrow.points[-1]:
        return f'{path} marker-end="url(#{lifecycle.name}-{"now" if now else kind})"/>'
    (x, y), dot = points[-1], HEADS[kind]
    return f'{path}/><circle class="{dot}" cx="{x:.1f}" cy="{y:.1f}" r="2.8"/>'


def _rounded(points: Sequence[Point]) -> str:
    """A path through the points whose corners are round."""
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (before, corner), (_, after) in pairwise(pairwise(points)):
        enter, leave = _towards(corner, before), _towards(corner, after)
        parts.append(f"L{enter[0]:.1f} {enter[1]:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {leave[0]:.1f} {leave[1]:.1f}")
    parts.append(f"L{points[-1][0]:.1f} {points[-1][1]:.1f}")
    return "".join(parts)


def _towards(corner: Point, other: Point) -> Point:
    """The point at most half the way, and at most a corner's radius, from the corner."""
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    length = max(abs(dx), abs(dy), 0.001)
    part = min(CORNER, length / 2) / length
    return (corner[0] + dx * part, corner[1] + dy * part)


def _box(lifecycle: Lifecycle, box: Box, *, now: bool) -> str:
    state, kind = box.state, phase_class(box.state)
    frame = f'<rect class="state {kind}{" now" if now else ""}" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.w:.1f}" height="{box.h:.1f}" rx="9"/>'
    inner = ""
    if kind in {"ended", "success"}:
        inner = f'<rect class="inner {kind}" style="fill:none" x="{box.x + 3.5:.1f}" y="{box.y + 3.5:.1f}" width="{box.w - 7:.1f}" height="{box.h - 7:.1f}" rx="6"/>'
    middle = box.y + box.h / 2
    return (
        f'<g id="{lifecycle.name}-{escape(state.name)}">{frame}{inner}'
        f'<text class="name" x="{box.centre:.1f}" y="{middle:.1f}">{escape(state.name)}</text>'
        f'<text class="rank muted" x="{box.centre:.1f}" y="{middle + 14:.1f}">{state.phase} · rank {state.rank}</text></g>'
    )


def _label(label: Label) -> Iterable[str]:
    ends = ' class="ends"' if label.ends else ""
    for number, line in enumerate(label.lines):
        trigger = f'<tspan class="trigger">{escape(line.triggers)}</tspan> ' if line.triggers else ""
        actors = f'<tspan class="muted">{escape(line.actors)}</tspan>'
        yield f'<text{ends} x="{label.x:.1f}" y="{label.y + number * LINE_H:.1f}">{trigger}{actors}</text>'


def _legend(lifecycle: Lifecycle, width: float, top: float) -> tuple[list[str], float]:
    """What the colours, lines and marks of this picture mean, in as many rows as the width needs."""
    parts = [f'<path class="line" style="opacity:.35" d="M{MARGIN} {top - 14:.1f}H{width - MARGIN:.1f}"/>']
    x, y = MARGIN, top + 8
    for kind, text in _legend_items(lifecycle):
        room = (30 if kind else 0) + len(text) * CHAR_W + 16
        if x + room > width - MARGIN:
            x, y = MARGIN, y + 22
        parts.append(_legend_item(kind, text, x, y))
        x += room
    return parts, y - top + 20


def _legend_items(lifecycle: Lifecycle) -> Iterable[tuple[str, str]]:
    yield from LEGEND_STATES
    opens = {t.opens for t in lifecycle.transitions}
    yield from ((kind, text) for kind, text, needs in LEGEND_LINES if needs in opens)
    if any(t.extension for t in lifecycle.transitions):
        yield "", f"{EXTENSION_MARK} added by a recorded decision"


def _legend_item(kind: str, text: str, x: float, y: float) -> str:
    if not kind:
        return f'<text class="muted" x="{x:.1f}" y="{y:.1f}">{text}</text>'
    mark = f'<rect class="state {kind}" x="{x:.1f}" y="{y - 10:.1f}" width="20" height="13" rx="4"/>'
    if kind.startswith("line"):
        mark = f'<path class="{kind}" d="M{x:.1f} {y - 4:.1f}h22"/>'
    return f'{mark}<text class="muted" x="{x + 28:.1f}" y="{y:.1f}">{text}</text>'
