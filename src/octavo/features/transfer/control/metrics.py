"""What the figures of tiers are called outside (TIR-22).

Promises: these names are stable, and written down in the guide to tiers.
Does not know: where figures come from.
"""

from collections.abc import Mapping
from typing import Final

METRICS: Final = {  # a tier's figures and their names in /metrics, where `_total` marks what only grows
    "rows": "capacity_blocks",
    "rows_used": "used_blocks",
    "rows_detached": "detached_blocks",
    "lookups": "lookups_total",
    "hits": "hits_total",
    "evicted": "evicted_blocks_total",
    "no_room": "no_room_total",
    "filled_by_reads": "filled_by_reads_total",
    "filled_by_stores": "filled_by_stores_total",
    "finds": "lookup_jobs",
    "promotions": "promotion_jobs",
    "cascades": "cascade_jobs",
    "failed_finds": "failed_lookup_jobs_total",
    "failed_promotions": "failed_promotion_jobs_total",
    "failed_cascades": "failed_cascade_jobs_total",
    "overdue": "overdue_jobs",
    "late": "late_jobs_total",
    "pinned": "pinned_blocks",
    "failed_reads": "failed_reads_total",
    "failed_writes": "failed_writes_total",
    "dropped": "dropped_total",
    "refused": "refused_total",
    "not_worth": "not_worth_total",
    "bytes_read": "read_bytes_total",
    "read_s": "read_seconds_total",
    "bytes_written": "written_bytes_total",
    "write_s": "write_seconds_total",
}


def labelled(metrics: Mapping[str, float]) -> dict[str, float]:
    """Figures "<tier>.<figure>" with the tier as a label, in the form of `observe.prometheus`; others as they are."""
    out: dict[str, float] = {}
    for name, value in metrics.items():
        tier, _, metric = name.rpartition(".")
        out[f"kv_tier_{METRICS[metric]}{{tier={tier}}}" if tier else name] = value
    return out
