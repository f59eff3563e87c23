"""The picture of a run is one well-formed file, whatever the run was."""

from array import array
from xml.etree import ElementTree

import pytest

from octavo.bench.plot import HEIGHT, MARGIN, WIDTH, as_svg, shares
from octavo.bench.samples import LoadResult, Sample


def runs():
    good = [
        Sample(due_s=i, start_s=i, end_s=i + 2.0, first_token_s=i + 0.5, token_times=array("d", [i + 0.5, i + 1.5]))
        for i in range(5)
    ]
    bad = Sample(due_s=1, start_s=1, end_s=2, error="x < y & z")
    whole = Sample(due_s=0, start_s=0, end_s=1, output_tokens=4)
    return {
        "plain": LoadResult(name="a & b", samples=tuple(good), wall_s=7.0),
        "with failures": LoadResult(name="w", samples=(*good, bad), wall_s=7.0),
        "nothing but failures": LoadResult(name="w", samples=(bad,), wall_s=1.0),
        "not streamed": LoadResult(name="w", samples=(whole,), wall_s=1.0),
        "no time at all": LoadResult(name="w", samples=(bad,), wall_s=0.0),
    }


@pytest.mark.parametrize("name", runs())
def test_the_picture_is_well_formed_and_needs_nothing(name):
    text = as_svg(runs()[name])
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "nan" not in text
    assert "href" not in text
    assert "<script" not in text
    points = [p.split(",") for line in root.iter("{*}polyline") for p in line.get("points").split()]
    points += [(c.get("cx"), c.get("cy")) for c in root.iter("{*}circle")]
    assert all(MARGIN <= float(x) <= WIDTH and 24 <= float(y) <= HEIGHT for x, y in points)


def test_failures_are_drawn():
    assert "1 failed" in as_svg(runs()["with failures"])
    assert "failed" not in as_svg(runs()["plain"])


@pytest.mark.parametrize("num", [0, 1, 7, 1999, 2000, 4001, 9999])
def test_shares_rise_to_one_and_stay_few(num):
    points = shares([float(i) for i in range(num)])
    assert points == sorted(points)
    assert len(points) <= 4001
    assert not num or points[-1] == (num - 1.0, 1.0)
