"""From a comparison's records to its table: medians over rounds, ratios, and shares of the machine's limit.

Promises: a ratio above 1 means that Octavo is better, whatever the unit; what failed is listed, never left out.
Does not know: how anything was measured.

A round's value is the median of its repeats; a cell shows the median over rounds and, with several, the lowest and
highest. The ratio is that of the medians of Octavo and of the best other engine of the same width.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from octavo.bench.peers.api import ModelShape
from octavo.bench.records import BenchRun, Probed
from octavo.bench.roof import Roof, limit, share
from octavo.bench.works import CAPACITY, Work, WorkMetric, median_of

OURS = "octavo"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One peer's figure over rounds, in the stored unit."""

    median: float
    low: float
    high: float
    num_rounds: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one work, model and width."""

    work: str
    model: str
    width: str
    figure: WorkMetric
    cells: dict[str, Cell]  # by peer
    best_other: str | None = None
    ratio: float | None = None
    share_of_limit: float | None = None  # Octavo's, else the best peer's


def median_roof(probes: Iterable[Probed]) -> Roof:
    """The middle of what was probed, field by field."""
    fields: dict[str, float] = {}
    for name in ("read_gb_s", "bf16_gflop_s", "int8_gop_s"):
        found = [value for probe in probes if (value := getattr(probe, name)) is not None]
        if found:
            fields[name] = statistics.median(found)
    return Roof(**fields)


def rows(
    runs: Sequence[BenchRun], works: Mapping[str, Work], shapes: Mapping[str, ModelShape], roof: Roof
) -> tuple[Row, ...]:
    """Every figure that has at least one value, in the order of works, models and widths as they were run."""
    places = dict.fromkeys((run.model, run.width) for run in runs)
    found = []
    for name in sorted(works):
        for model, width in places:
            here = [run for run in runs if (run.work, run.model, run.width) == (name, model, width)]
            for figure in works[name].figures:
                cells = _cells(here, figure.key)
                if cells:
                    found.append(_row(name, model, width, figure, cells, shapes.get(model), roof))
    return tuple(found)


def _cells(runs: Sequence[BenchRun], key: str) -> dict[str, Cell]:
    by_peer: dict[str, list[float]] = {}
    for run in runs:
        value = median_of(run.values, key)
        if run.error is None and value is not None:
            by_peer.setdefault(run.peer, []).append(value)
    return {
        peer: Cell(median=statistics.median(v), low=min(v), high=max(v), num_rounds=len(v))
        for peer, v in by_peer.items()
    }


def _row(
    work: str, model: str, width: str, figure: WorkMetric, cells: dict[str, Cell], shape: ModelShape | None, roof: Roof
) -> Row:
    better = max if figure.higher_is_better else min
    others = {peer: cell.median for peer, cell in cells.items() if peer != OURS}
    best_other = better(others, key=lambda peer: others[peer]) if others else None
    ours = cells[OURS].median if OURS in cells else None
    ratio = None
    if best_other is not None and ours:
        theirs = others[best_other]
        ratio = ours / theirs if figure.higher_is_better else theirs / ours
    value = ours if ours is not None else others[best_other or ""]
    best = limit(figure.key, shape, width, roof) if shape is not None else None
    return Row(
        work=work,
        model=model,
        width=width,
        figure=figure,
        cells=cells,
        best_other=best_other,
        ratio=ratio,
        share_of_limit=share(value, best, higher_is_better=figure.higher_is_better) if best and value else None,
    )


def table(found: Sequence[Row]) -> str:
    """The rows for people; peers are columns."""
    if not found:
        return "nothing was measured"
    peers = sorted({peer for row in found for peer in row.cells}, key=lambda peer: (peer != OURS, peer))
    head = ["work", "model", "width", "figure", "unit", *peers, "ratio", "of limit"]
    lines = [head] + [
        [
            *(row.work, row.model, row.width, row.figure.title, row.figure.unit),
            *(_cell(row.cells.get(peer), row.figure.scale) for peer in peers),
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            "-" if row.share_of_limit is None else f"{row.share_of_limit:.0%}",
        ]
        for row in found
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    note = "ratio: Octavo against the best other engine of the width, above 1 is better; of limit: share of what the\n"
    note += "machine's bandwidth and arithmetic allow; cells: median over rounds (lowest..highest)"
    return "\n".join([*texts, "", note])


def failures(runs: Iterable[BenchRun]) -> tuple[str, ...]:
    """One line for each run that failed."""
    return tuple(
        f"{run.work if run.work != CAPACITY else 'capacity for W5'} {run.model} {run.width} {run.peer}, "
        f"round {run.round}: {run.error}"
        for run in runs
        if run.error is not None
    )


def best_capacity(runs: Iterable[BenchRun], model: str, width: str) -> float | None:
    """Requests a second of the best engine but Octavo; of Octavo when it is alone."""
    found: dict[str, float] = {}
    for run in runs:
        value = median_of(run.values, "requests_s")
        if run.work == CAPACITY and (run.model, run.width) == (model, width) and value is not None:
            found[run.peer] = value
    others = [value for peer, value in found.items() if peer != OURS]
    return max(others or list(found.values()), default=None)


def _cell(cell: Cell | None, scale: float) -> str:
    if cell is None:
        return "-"
    text = _number(cell.median * scale)
    return text if cell.num_rounds == 1 else f"{text} ({_number(cell.low * scale)}..{_number(cell.high * scale)})"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
