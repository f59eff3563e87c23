"""Figures of tiers outside: each has a name, and the guide says what it means (TIR-22)."""

from pathlib import Path

from octavo.features.transfer.control.metrics import METRICS, labelled
from tests.support.tier_rig import Rig

GUIDE = Path(__file__).parents[3] / "docs" / "kv-tiers.md"


def test_every_figure_has_a_name_and_every_name_is_in_the_guide():
    stats = {**Rig(tiers=("disk", "far")).stack.stats(), "host.not_worth": 0}
    given = {name.rpartition(".")[2] for name in stats if "." in name}
    assert given == set(METRICS)
    text = GUIDE.read_text(encoding="utf-8")
    assert [name for name in METRICS.values() if f"`octavo_kv_tier_{name}`" not in text] == []
    assert {"kv_tier_lookups_total{tier=disk}", "kv_tier_pinned_blocks{tier=far}"} <= set(labelled(stats))
