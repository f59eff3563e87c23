"""The figures as Prometheus reads them (OPS-6, MET-01)."""

import re
import shutil
import subprocess

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from octavo.base.outputs import RequestTimes, StatsSnapshot
from octavo.base.types import FinishReason
from octavo.features.router.addresses import read_addresses
from octavo.features.router.fleet import Fleet, Member
from octavo.features.router.health import InstanceHealth
from octavo.features.router.journey import Failure, Leg
from octavo.features.router.metrics import RouterMetrics
from octavo.features.transfer.control.metrics import METRICS, labelled
from octavo.observe import prometheus
from octavo.observe.prometheus import PrometheusText
from octavo.observe.stats import RequestRecord, StatsLog
from tests.support.metrics_lint import complaints


def samples(text: PrometheusText) -> dict[tuple[str, str], float]:
    """(name, labels beyond model and engine) -> value."""
    out = {}
    for family in text_string_to_metric_families(text.render().decode()):
        for s in family.samples:
            labels = {k: v for k, v in s.labels.items() if k not in ("model", "engine")}
            assert s.labels["model"] == 'm"1' and s.labels["engine"] == "0"
            out[s.name, ",".join(f"{k}={v}" for k, v in labels.items())] = s.value
    return out


def full_book() -> StatsLog:
    book = StatsLog(lambda: 0.0)
    book.absorb(
        StatsSnapshot(
            seq=1, num_running=3, num_waiting=2, num_blocks_total=10, num_blocks_used=5, kv_usage=0.5, output_tokens=9,
            preemptions=1, step_rows=3, step_tokens=64, step_s=0.01, parts={"spec": {"accepted": 4.0}},
        )
    )  # fmt: skip
    book.ended(RequestRecord(reason=FinishReason.LENGTH, times=RequestTimes(1.0, 1.0, 1.25, 2.0, 3.0), output_tokens=5))
    book.gaps([0.02, 0.03])
    book.refused()
    return book


def test_values_are_those_of_the_book() -> None:
    got = samples(PrometheusText(full_book(), model='m"1'))
    want = {
        ("octavo_engine_up", ""): 1, ("octavo_requests_running", ""): 3, ("octavo_requests_waiting", ""): 2,
        ("octavo_kv_cache_usage_ratio", ""): 0.5, ("octavo_kv_blocks_used", ""): 5, ("octavo_output_tokens_total", ""): 9,
        ("octavo_preemptions_total", ""): 1, ("octavo_requests_refused_total", ""): 1,
        ("octavo_requests_finished_total", "reason=length"): 1, ("octavo_requests_finished_total", "reason=stop"): 0,
        ("octavo_inter_token_seconds_count", ""): 2, ("octavo_inter_token_seconds_bucket", "le=0.025"): 1,
        ("octavo_inter_token_seconds_bucket", "le=+Inf"): 2, ("octavo_queue_seconds_sum", ""): 0.25,
        ("octavo_feature_metric", "feature=spec,metric=accepted"): 4, ("octavo_step_tokens_sum", ""): 64,
    }  # fmt: skip
    assert {key: got[key] for key in want} == want


def test_figures_of_several_things_have_a_metric_each_with_the_thing_as_a_label() -> None:
    book = full_book()
    names = ("host", 'file:///a b/{x}="1",y')
    parts = {"transfer": {f"kv_tier_hits_total{{tier={n}}}": float(i) for i, n in enumerate(names)}}
    parts["transfer"] |= {"kv_tier_jobs{tier=host}": 3.0, "plain": 5.0}
    book.absorb(StatsSnapshot(seq=3, num_blocks_total=10, parts=parts))
    text = PrometheusText(book, model='m"1')
    got = samples(text)
    assert got["octavo_kv_tier_hits_total", "tier=host"] == 0
    assert got["octavo_kv_tier_hits_total", f"tier={names[1]}"] == 1
    assert got["octavo_kv_tier_jobs", "tier=host"] == 3
    assert got["octavo_feature_metric", "feature=transfer,metric=plain"] == 5
    kinds = {f.name: f.type for f in text_string_to_metric_families(text.render().decode())}
    assert kinds["octavo_kv_tier_hits"] == "counter" and kinds["octavo_kv_tier_jobs"] == "gauge"


def test_gauges_go_to_zero_after_a_mass_abort_met_01() -> None:
    book = full_book()
    text = PrometheusText(book, model='m"1')
    book.absorb(StatsSnapshot(seq=2, num_blocks_total=10, output_tokens=9))
    got = samples(text)
    for name in ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "kv_blocks_used"):
        assert got[f"octavo_{name}", ""] == 0
    assert got["octavo_output_tokens_total", ""] == 9


def test_the_documented_table_is_what_is_rendered() -> None:
    """Names are stable: the module's table and the scrape list the same metrics."""
    documented = set(re.findall(r"`(octavo_[a-z_]+)(?:\{[a-z,]+\})?`", prometheus.__doc__ or ""))
    rendered = {
        re.sub(r"_(bucket|sum|count)$", "", name) if name.removesuffix("_total") == name else name
        for name, _ in samples(PrometheusText(full_book(), model='m"1', about={"version": "1", "usage": "test"}))
    }
    assert rendered == documented


def test_nothing_is_registered_globally_and_two_books_live_side_by_side() -> None:
    before = set(REGISTRY._names_to_collectors)
    first, second = (PrometheusText(full_book(), model=name) for name in ("a", "b"))
    assert set(REGISTRY._names_to_collectors) == before
    assert b'model="a"' in first.render() and b'model="a"' not in second.render()
    assert prometheus.CONTENT_TYPE.startswith("text/plain")


def tier_parts() -> dict[str, dict[str, float]]:
    """A figure of every kind that tiers report."""
    return {"transfer": labelled({f"host.{figure}": 1.0 for figure in METRICS} | {"ignored_reports": 0.0})}


def scrapes() -> dict[str, bytes]:
    """What servers and routers tell Prometheus."""
    book = full_book()
    book.absorb(StatsSnapshot(seq=3, num_blocks_total=10, parts=tier_parts()))
    fleet = Fleet([Member(read_addresses((), (), ("http://h:1",))[0], InstanceHealth(2, lambda: 0.0))], load_weight=1)
    router = RouterMetrics(fleet)
    router.chose(Leg.WHOLE, 3)
    router.retries[Leg.WHOLE, next(iter(Failure))] += 1
    about = {"version": "1", "usage": "api_server"}
    return {"server": PrometheusText(book, model="m", about=about).render(), "router": router.render()}


@pytest.mark.parametrize("who", ["server", "router"])
def test_prometheus_own_checker_has_no_complaint(who: str) -> None:
    """F93: counters end in _total and nothing else does; units, help and types are as Prometheus wants them."""
    assert complaints(scrapes()[who].decode()) == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
@pytest.mark.parametrize("who", ["server", "router"])
def test_promtool_has_no_complaint(who: str) -> None:
    """F93."""
    done = subprocess.run(["promtool", "check", "metrics"], input=scrapes()[who], capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("# HELP octavo_x_total h\n# TYPE octavo_x_total gauge\noctavo_x_total 1\n", "only a counter"),
        ("# HELP octavo_x h\n# TYPE octavo_x counter\noctavo_x 1\n", "ends in _total"),
        ("# TYPE octavo_x gauge\noctavo_x 1\n", "no help"),
        ("# HELP octavo_x_ms h\n# TYPE octavo_x_ms gauge\noctavo_x_ms 1\n", "abbreviation"),
    ],
)
def test_the_check_finds_faults(text: str, fault: str) -> None:
    """F93: a check that cannot fail is none."""
    assert any(fault in line for line in complaints(text))
