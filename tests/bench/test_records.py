"""Records of comparisons keep what was measured."""

from array import array

import msgspec

from octavo.bench.records import plain_sample
from octavo.bench.samples import Sample


def test_a_zero_that_was_measured_is_kept() -> None:
    """F12: 0 equals False for Python, but 0 cached tokens is a figure and no `counted` is none."""
    sample = Sample(
        due_s=0.0, start_s=0.5, end_s=1.23456789, cached_tokens=0, conversation=0, token_times=array("d", [0.0, 1.0])
    )
    plain = plain_sample(msgspec.structs.asdict(sample))
    assert plain == {
        "due_s": 0.0, "start_s": 0.5, "end_s": round(1.23456789, 6), "cached_tokens": 0, "output_tokens": 0,
        "conversation": 0, "token_times": [0.0, 1.0],
    }  # fmt: skip
