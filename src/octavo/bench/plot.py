"""A run as a picture: one self-contained SVG with what the percentiles hide.

Promises: no dependency, no script, no font of its own; the file opens in any browser.
Does not know: how samples were taken.

Four panels: the shares of requests by time to first token and of gaps between tokens (cumulative), the time to
first token along the run, and the tokens that came in each interval of the run.
"""

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from octavo.bench.report import itl_s, ttft_s
from octavo.bench.samples import LoadResult

WIDTH, HEIGHT, MARGIN = 440, 260, 56
NUM_TICKS, NUM_BINS, MAX_POINTS = 4, 60, 2000
COLOUR, BAD, GREY = "#2457a8", "#b3261e", "#777"
Point = tuple[float, float]


def as_svg(result: LoadResult, title: str | None = None) -> str:
    """The picture as text."""
    good = [s for s in result.samples if s.ok]
    firsts = sorted(v * 1000 for s in good if (v := ttft_s(s)) is not None)
    gaps = sorted(v * 1000 for s in good for v in itl_s(s))
    along = [(s.start_s, v * 1000) for s in good if (v := ttft_s(s)) is not None]
    failed = [(s.start_s, 0.0) for s in result.samples if not s.ok]
    tokens, step_s = _rate(result)
    panels = [
        _panel("TTFT: share of requests", "ms", "", [_line(shares(firsts))], shares(firsts)),
        _panel("ITL: share of gaps", "ms", "", [_line(shares(gaps))], shares(gaps)),
        _panel(
            "TTFT over the run" + (f" (red: {len(failed)} failed)" if failed else ""),
            "s", "ms", [_dots(along, COLOUR), _dots(failed, BAD)], along + failed,
        ),
        _panel(f"events with tokens per second, each {step_s:.2g} s", "s", "", [_line(tokens)], tokens),
    ]  # fmt: skip
    drawn = "".join(
        f'<g transform="translate({i % 2 * WIDTH},{40 + i // 2 * HEIGHT})">{panel}</g>'
        for i, panel in enumerate(panels)
    )
    heading = escape(title or f"{result.name}: {len(good)} of {len(result.samples)} requests, {result.wall_s:.1f} s")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{40 + 2 * HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="16" y="26" font-size="15">{heading}</text>{drawn}</svg>\n'
    )


def shares(ordered: Sequence[float]) -> list[Point]:
    """Points (value, share of values up to it) of sorted values, thinned to what can be seen."""
    total = len(ordered)
    step = max(total // MAX_POINTS, 1)
    kept = [(ordered[i], (i + 1) / total) for i in range(0, total, step)]
    return [*kept, (ordered[-1], 1.0)] if total else []


def _rate(result: LoadResult) -> tuple[list[Point], float]:
    """Events per second in equal intervals of the run, and the length of an interval."""
    step_s = max(result.wall_s, 1e-9) / NUM_BINS
    counts = [0] * NUM_BINS
    for sample in result.samples:
        for at in sample.token_times:
            counts[min(max(int(at / step_s), 0), NUM_BINS - 1)] += 1
    return [(i * step_s, n / step_s) for i, n in enumerate(counts)], step_s


Draw = Callable[[Callable[[Point], Point]], str]


def _line(points: Sequence[Point]) -> Draw:
    def draw(place: Callable[[Point], Point]) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
        return f'<polyline points="{path}" fill="none" stroke="{COLOUR}" stroke-width="1.5"/>'

    return draw


def _dots(points: Sequence[Point], colour: str) -> Draw:
    step = max(len(points) // MAX_POINTS, 1)

    def draw(place: Callable[[Point], Point]) -> str:
        return "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in map(place, points[::step])
        )

    return draw


def _panel(title: str, x_unit: str, y_unit: str, drawings: Sequence[Draw], points: Sequence[Point]) -> str:
    right = max((x for x, _ in points), default=0.0) or 1.0
    top = max((y for _, y in points), default=0.0) or 1.0
    inner_w, inner_h = WIDTH - 2 * MARGIN + 24, HEIGHT - MARGIN - 24

    def place(point: Point) -> Point:
        return MARGIN + point[0] / right * inner_w, 24 + inner_h - point[1] / top * inner_h

    parts = [f'<text x="{MARGIN}" y="14" font-size="12">{escape(title)}</text>']
    for i in range(NUM_TICKS + 1):
        x, y = place((right * i / NUM_TICKS, top * i / NUM_TICKS))
        low = 24 + inner_h
        parts.append(f'<path d="M{MARGIN} {y:.1f}H{MARGIN + inner_w}M{x:.1f} {low}v4" stroke="#ddd" fill="none"/>')
        parts.append(_label(x, low + 16, right * i / NUM_TICKS, x_unit, "middle"))
        parts.append(_label(MARGIN - 5, y + 4, top * i / NUM_TICKS, y_unit, "end"))
    if not points:
        parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle" fill="{GREY}">no values</text>')
    return "".join(parts) + "".join(draw(place) for draw in drawings)


def _label(x: float, y: float, value: float, unit: str, anchor: str) -> str:
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{GREY}">{text}{" " + unit if unit else ""}</text>'
    )
