"""Where everything of a lifecycle's picture stands: pure geometry, no drawing.

Ranks are rows, from top to bottom. The way to success is the first column (the spine); every other state has a column
to its right, above which its incoming arrows join into one trunk. What opens a new attempt or generation goes back up
in a lane at the left. A label stands above the straight piece of its arrow next to the state it leaves, and columns and
gaps are as wide as their labels, so that no label can lie on another.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from trellis.lifecycles.lifecycle import Lifecycle, Opens, Phase, State, Transition

CHAR_W = 5.9
"""Average width of a letter of a label at 11 px, on the wide side."""
NAME_CHAR_W = 8.4
LINE_H = 14.0
LABEL_CHARS_MAX = 46
BOX_H_MIN = 46.0
BOX_W_MIN = 118.0
SLOT_PAD = 9.0
GAP_H_MIN = 34.0
LANE_W = 22.0
MARGIN = 26.0
HEAD_H = 62.0
START_H = 26.0
EXTENSION_MARK = "†"

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a label: what is pulled, and by whom."""

    triggers: str
    actors: str

    @property
    def width(self) -> float:
        return (len(self.triggers) + len(self.actors) + 2) * CHAR_W


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Lines from top to bottom; `x` is the left edge, or the right edge when the text ends there."""

    x: float
    y: float
    lines: tuple[Line, ...]
    ends: bool = False

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom."""
        width = widest(self.lines)
        left = self.x - width if self.ends else self.x
        return (left, self.y - LINE_H, left + width, self.y + (len(self.lines) - 1) * LINE_H)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """One state."""

    state: State
    column: int
    row: int
    x: float
    y: float
    w: float
    h: float

    @property
    def centre(self) -> float:
        return self.x + self.w / 2

    @property
    def right(self) -> float:
        return self.x + self.w

    @property
    def bottom(self) -> float:
        return self.y + self.h


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """All transitions from one state to another that treat progress alike; `source` None is the submit."""

    source: str | None
    target: str
    opens: Opens
    points: tuple[Point, ...]
    label: Label


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A whole picture."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """An arrow before it has a place."""

    source: str
    target: str
    opens: Opens
    lines: tuple[Line, ...]

    @property
    def height(self) -> float:
        return len(self.lines) * LINE_H + SLOT_PAD

    @property
    def width(self) -> float:
        return widest(self.lines)


def layout(lifecycle: Lifecycle) -> Layout:
    """The picture of a lifecycle."""
    return _Plan(lifecycle).layout()


def widest(lines: Iterable[Line]) -> float:
    """The width of a label's longest line."""
    return max((line.width for line in lines), default=0.0)


def label_lines(transitions: Sequence[Transition]) -> tuple[Line, ...]:
    """One line for each set of actors, broken where it grows too long; `†` marks what a decision added."""
    lines: list[Line] = []
    by_actors: dict[str, list[str]] = defaultdict(list)
    for t in transitions:
        by_actors[", ".join(sorted(t.actors))].append(t.trigger + (EXTENSION_MARK if t.extension else ""))
    for actors, triggers in by_actors.items():
        lines.extend(_broken(", ".join(triggers), actors))
    return tuple(lines)


def _broken(triggers: str, actors: str) -> Iterable[Line]:
    names = actors.split(", ")
    head = triggers
    while names:
        taken = 1
        while taken < len(names) and len(head) + len(", ".join(names[: taken + 1])) <= LABEL_CHARS_MAX:
            taken += 1
        more = "," if taken < len(names) else ""
        yield Line(triggers=head, actors=", ".join(names[:taken]) + more)
        names = names[taken:]
        head = ""


def edges_of(lifecycle: Lifecycle) -> list[Edge]:
    """The arrows between states, in the order of the table."""
    groups: dict[tuple[str, str, Opens], list[Transition]] = defaultdict(list)
    for t in lifecycle.transitions:
        if t.source is not None:
            groups[t.source, t.target, t.opens].append(t)
    return [Edge(source=s, target=t, opens=o, lines=label_lines(group)) for (s, t, o), group in groups.items()]


def spine_of(lifecycle: Lifecycle) -> list[str]:
    """The shortest way from the first state to success; the table's order decides between equals."""
    reached: dict[str, list[str]] = {lifecycle.initial.name: [lifecycle.initial.name]}
    frontier = [lifecycle.initial.name]
    while frontier:
        here = frontier.pop(0)
        if lifecycle.by_name[here].success:
            return reached[here]
        for t in lifecycle.transitions:
            if t.source == here and t.target not in reached:
                reached[t.target] = [*reached[here], t.target]
                frontier.append(t.target)
    return [lifecycle.initial.name]


class _Plan:
    """Builds one layout: cells, then sizes, then places, then arrows."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        ranks = sorted({state.rank for state in lifecycle.states})
        self.row = {state.name: ranks.index(state.rank) for state in lifecycle.states}
        self.edges = edges_of(lifecycle)
        self.column = self._columns()
        self.submit = label_lines([t for t in lifecycle.transitions if t.source is None])
        self.right_in: dict[str, list[Edge]] = defaultdict(list)
        self.right_out: dict[str, list[Edge]] = defaultdict(list)
        self.left_out: dict[str, list[Edge]] = defaultdict(list)
        self.down: dict[int, list[Edge]] = defaultdict(list)
        self.channels: dict[int, dict[tuple[str, Opens, tuple[Line, ...]], list[Edge]]] = defaultdict(dict)
        self.lanes = self._lanes()
        for edge in self.edges:
            self._sort(edge)
        for state, edges in self.right_out.items():
            # The farthest target leaves at the top: its line then passes above where the nearer trunks begin.
            self.right_out[state] = sorted(edges, key=lambda e: -self.column[e.target])

    def layout(self) -> Layout:
        boxes = self._boxes()
        arrows = [self._submit_arrow(boxes), *(self._arrow(edge, boxes) for edge in self.edges)]
        last = len(set(self.row.values())) - 1
        bottom = max(box.bottom for box in boxes.values()) + self._channels_h(last)
        right = max(
            *(box.right for box in boxes.values()),
            *(arrow.label.box[2] for arrow in arrows),
        )
        return Layout(width=right + MARGIN, height=bottom, boxes=tuple(boxes.values()), arrows=tuple(arrows))

    # -- cells ---------------------------------------------------------------------------------------------------

    def _columns(self) -> dict[str, int]:
        column = dict.fromkeys(spine_of(self.lifecycle), 0)
        sides = [state.name for state in self.lifecycle.states if state.name not in column]
        sides.sort(key=lambda name: (self.row[name], -min(self._source_rows(name))))
        for name in sides:
            below = [column[source] for source in self._forward_sources(name) if column.get(source)]
            column[name] = next(c for c in (*below, *range(1, len(self.row) + 1)) if self._fits(name, c, column))
        return column

    def _forward_sources(self, name: str) -> list[str]:
        return [e.source for e in self.edges if e.target == name and self.row[e.source] < self.row[name]]

    def _source_rows(self, name: str) -> list[int]:
        return [self.row[source] for source in self._forward_sources(name)] or [self.row[name]]

    def _fits(self, name: str, column: int, taken: dict[str, int]) -> bool:
        """Nothing stands in the cell or where the trunk above it runs; cells are filled from the top row down."""
        joining = [self.row[source] for source in self._forward_sources(name) if taken.get(source) != column]
        first = min(joining, default=self.row[name])
        return not any(c == column and first <= self.row[other] <= self.row[name] for other, c in taken.items())

    def _lanes(self) -> dict[tuple[str, Opens], int]:
        """One lane for each state that is gone back to; what opens a generation runs outside."""
        back = {(e.target, e.opens) for e in self.edges if self._is_back(e)}
        return {key: place for place, key in enumerate(sorted(back, key=lambda k: (k[1], -self.row[k[0]])))}

    def _is_back(self, edge: Edge) -> bool:
        return edge.source != edge.target and self.row[edge.target] <= self.row[edge.source]

    def _sort(self, edge: Edge) -> None:
        """How the edge runs decides where room is needed for it."""
        source_c, target_c = self.column[edge.source], self.column[edge.target]
        if edge.source == edge.target or (self._is_back(edge) and source_c == 0):
            self.left_out[edge.source].append(edge)
        elif self._is_back(edge):
            same = self.channels[self.row[edge.source]].setdefault((edge.target, edge.opens, edge.lines), [])
            same.append(edge)
        elif target_c > source_c:
            self.right_out[edge.source].append(edge)
        else:
            self.down[self.row[edge.source]].append(edge)
            if target_c < source_c:
                self.right_in[edge.target].append(edge)

    # -- sizes ---------------------------------------------------------------------------------------------------

    def _lanes_into(self, name: str) -> list[tuple[str, Opens]]:
        """Outermost first: a lane outside then enters above where an inner one ends."""
        return sorted((key for key in self.lanes if key[0] == name), key=lambda key: -self.lanes[key])

    def _left_h(self, name: str) -> float:
        return len(self._lanes_into(name)) * LINE_H + sum(self._left_slot(e) for e in self.left_out[name])

    def _left_slot(self, edge: Edge) -> float:
        return max(edge.height, 30.0) if edge.source == edge.target else edge.height

    def _right_h(self, name: str) -> float:
        return len(self.right_in[name]) * LINE_H + sum(e.height for e in self.right_out[name])

    def _box_h(self, name: str) -> float:
        return max(BOX_H_MIN, self._left_h(name) + SLOT_PAD, self._right_h(name) + SLOT_PAD)

    def _channels_h(self, row: int) -> float:
        return sum(len(lines) * LINE_H + SLOT_PAD + 4 for _, _, lines in self.channels[row])

    def _down_h(self, row: int) -> float:
        return max((e.height + 16 for e in self.down[row]), default=0.0)

    def _row_tops(self) -> list[float]:
        heights = [max(self._box_h(n) for n in group) for _, group in self._rows()]
        tops = [HEAD_H + START_H + len(self.submit) * LINE_H]
        for row, height in enumerate(heights[:-1]):
            tops.append(tops[-1] + height + max(GAP_H_MIN, self._down_h(row) + self._channels_h(row)))
        return tops

    def _rows(self) -> list[tuple[int, list[str]]]:
        ordered = sorted(self.row, key=self.row.__getitem__)
        return [(row, list(group)) for row, group in groupby(ordered, key=self.row.__getitem__)]

    def _column_lefts(self, widths: dict[int, float]) -> list[float]:
        left_labels = max((e.width for edges in self.left_out.values() for e in edges), default=0.0)
        loops = any(e.source == e.target for edges in self.left_out.values() for e in edges)
        lanes = len(self.lanes) * LANE_W
        lefts = [MARGIN + lanes + (left_labels + 16 if left_labels else 0.0) + (22.0 if loops else 0.0)]
        for column in range(max(self.column.values())):
            names = [name for name, c in self.column.items() if c == column]
            labels = max((e.width for n in names for e in self.right_out[n]), default=0.0)
            # The label may reach as far as the next trunk, which stands in the middle of the next column.
            gap = max(34.0, labels + 26 - widths[column + 1] / 2)
            lefts.append(lefts[-1] + widths[column] + gap)
        return lefts

    def _boxes(self) -> dict[str, Box]:
        widths: dict[int, float] = defaultdict(float)
        for name, column in self.column.items():
            widths[column] = max(widths[column], BOX_W_MIN, len(name) * NAME_CHAR_W + 34)
        lefts, tops = self._column_lefts(widths), self._row_tops()
        return {
            state.name: Box(
                state=state,
                column=self.column[state.name],
                row=self.row[state.name],
                x=lefts[self.column[state.name]],
                y=tops[self.row[state.name]],
                w=widths[self.column[state.name]],
                h=self._box_h(state.name),
            )
            for state in self.lifecycle.states
        }

    # -- arrows --------------------------------------------------------------------------------------------------

    def _submit_arrow(self, boxes: dict[str, Box]) -> Arrow:
        box = boxes[self.lifecycle.initial.name]
        x, top = box.centre, HEAD_H
        label = Label(x=x + 10, y=top + LINE_H, lines=self.submit)
        return Arrow(source=None, target=box.state.name, opens=Opens.SAME, points=((x, top), (x, box.y)), label=label)

    def _arrow(self, edge: Edge, boxes: dict[str, Box]) -> Arrow:
        source, target = boxes[edge.source], boxes[edge.target]
        if edge.source == edge.target:
            points, label = self._loop(edge, source)
        elif self._is_back(edge) and source.column == 0:
            points, label = self._back(edge, source, target)
        elif self._is_back(edge):
            points, label = self._around(edge, source, target, boxes)
        elif target.column > source.column:
            points, label = self._tap(edge, source, target)
        else:
            points, label = self._fall(edge, source, target)
        return Arrow(source=edge.source, target=edge.target, opens=edge.opens, points=points, label=label)

    def _tap(self, edge: Edge, source: Box, target: Box) -> tuple[tuple[Point, ...], Label]:
        """To the right, then down the target's trunk."""
        before = self.right_out[edge.source][: self.right_out[edge.source].index(edge)]
        top = source.y + (source.h - self._right_h(edge.source)) / 2 + len(self.right_in[edge.source]) * LINE_H
        top += sum(e.height for e in before)
        y = top + edge.height - SLOT_PAD / 2
        points = ((source.right, y), (target.centre, y), (target.centre, target.y))
        return points, Label(x=source.right + 9, y=top + LINE_H - 2, lines=edge.lines)

    def _fall(self, edge: Edge, source: Box, target: Box) -> tuple[tuple[Point, ...], Label]:
        """Straight down, or down and then left into the spine."""
        label = Label(x=source.centre + 10, y=source.bottom + LINE_H + 6, lines=edge.lines)
        if target.column == source.column:
            return ((source.centre, source.bottom), (source.centre, target.y)), label
        y = target.y + (target.h - self._right_h(edge.target)) / 2
        y += self.right_in[edge.target].index(edge) * LINE_H + LINE_H / 2
        return ((source.centre, source.bottom), (source.centre, y), (target.right, y)), label

    def _loop(self, edge: Edge, box: Box) -> tuple[tuple[Point, ...], Label]:
        top, height = self._left_top(edge, box), self._left_slot(edge)
        middle, x = top + height / 2, box.x - 22
        points = ((box.x, middle - 9), (x, middle - 9), (x, middle + 9), (box.x, middle + 9))
        first = middle - (len(edge.lines) - 1) * LINE_H / 2 + 4
        return points, Label(x=x - 7, y=first, lines=edge.lines, ends=True)

    def _back(self, edge: Edge, source: Box, target: Box) -> tuple[tuple[Point, ...], Label]:
        top = self._left_top(edge, source)
        y = top + edge.height - SLOT_PAD / 2
        points = ((source.x, y), *self._up_the_lane(edge, y, target))
        return points, Label(x=source.x - 9, y=top + LINE_H - 2, lines=edge.lines, ends=True)

    def _around(self, edge: Edge, source: Box, target: Box, boxes: dict[str, Box]) -> tuple[tuple[Point, ...], Label]:
        """Down into the gap below the row, left under everything, and up a lane."""
        key = (edge.target, edge.opens, edge.lines)
        row = self.channels[source.row]
        keys = list(row)
        floor = max(box.bottom for box in boxes.values() if box.row == source.row) + self._down_h(source.row)
        y = floor + sum(len(k[2]) * LINE_H + SLOT_PAD + 4 for k in keys[: keys.index(key) + 1]) - SLOT_PAD / 2
        x = source.centre - 26
        points = ((x, source.bottom), (x, y), *self._up_the_lane(edge, y, target))
        nearest = min(boxes[e.source].centre for e in row[key]) - 26
        lines_h = (len(edge.lines) - 1) * LINE_H
        return points, Label(x=nearest - 10, y=y - lines_h - 5, lines=edge.lines, ends=True)

    def _up_the_lane(self, edge: Edge, y: float, target: Box) -> tuple[Point, ...]:
        lane = self.lanes[edge.target, edge.opens]
        x = MARGIN + (len(self.lanes) - 1 - lane) * LANE_W
        entry = target.y + (target.h - self._left_h(edge.target)) / 2
        entry += self._lanes_into(edge.target).index((edge.target, edge.opens)) * LINE_H + LINE_H / 2
        return ((x, y), (x, entry), (target.x, entry))

    def _left_top(self, edge: Edge, box: Box) -> float:
        before = self.left_out[edge.source][: self.left_out[edge.source].index(edge)]
        top = box.y + (box.h - self._left_h(edge.source)) / 2 + len(self._lanes_into(edge.source)) * LINE_H
        return top + sum(self._left_slot(e) for e in before)


def phase_class(state: State) -> str:
    """How a state is coloured: by phase, with the good end apart."""
    return "success" if state.phase is Phase.ENDED and state.success else state.phase.value
