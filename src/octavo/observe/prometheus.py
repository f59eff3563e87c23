"""The metrics of `StatsLog` in Prometheus' text format (OPS-6).

Promises: these names and labels are stable; every series carries `model` and `engine`. A scrape reads the
book and nothing else, so it never waits for the engine.
Does not know: HTTP, or how a value came about.

| Metric | Kind | Means |
|---|---|---|
| `octavo_info{version,usage}` | gauge | always 1; Octavo's version, and the door through which the engine was opened |
| `octavo_engine_up` | gauge | 1 while the engine is alive |
| `octavo_requests_running` | gauge | requests that hold a place in the batch |
| `octavo_requests_waiting` | gauge | requests that wait for a place |
| `octavo_kv_cache_usage_ratio` | gauge | share of KV blocks held by live requests, 0 to 1 |
| `octavo_kv_blocks_used`, `octavo_kv_blocks` | gauge | KV blocks, cached but free ones not counted as used |
| `octavo_requests_finished_total{reason}` | counter | answers that ended: stop, length, abort, ignored, error, repetition |
| `octavo_requests_refused_total` | counter | requests turned away because too many waited |
| `octavo_prompt_tokens_total` | counter | prompt tokens of requests that got a first token, cached ones included, once for all `n` answers |
| `octavo_output_tokens_total` | counter | tokens generated |
| `octavo_prefix_cache_query_tokens_total` | counter | prompt tokens looked up in the prefix cache, once for all `n` answers |
| `octavo_prefix_cache_hit_tokens_total` | counter | those of them that were found |
| `octavo_prefix_cache_shared_tokens_total` | counter | prompt tokens that further answers (`n` above 1) took from the first |
| `octavo_prefix_cache_resumed_tokens_total` | counter | tokens that preempted requests found again, and need not compute twice |
| `octavo_preemptions_total` | counter | requests that lost their place and start again |
| `octavo_queue_seconds` | histogram | from the queue to the first scheduled step |
| `octavo_prefill_seconds` | histogram | from the first scheduled step to the first token |
| `octavo_time_to_first_token_seconds` | histogram | from arrival to the first token |
| `octavo_inter_token_seconds` | histogram | between successive outputs of a request |
| `octavo_decode_seconds` | histogram | from the first token to the end |
| `octavo_end_to_end_seconds` | histogram | from arrival to the end |
| `octavo_request_prompt_tokens` | histogram | prompt length of a request |
| `octavo_request_output_tokens` | histogram | length of an answer |
| `octavo_step_seconds` | histogram | one step of the engine |
| `octavo_step_tokens` | histogram | tokens computed in one step |
| `octavo_feature_metric{feature,metric}` | gauge | a metric of a feature, or of a part of one |

A feature whose metrics are of several things names them "what{label=thing}": `octavo_` and what, with that label; a
counter where what ends in `_total`. Its guide says what they mean.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from octavo.observe.stats import Histogram, StatsLog

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_LABELS = ("model", "engine")


class PrometheusText:
    """Renders one book.

    Owns: its registry; nothing is registered globally.
    """

    def __init__(
        self, stats_log: StatsLog, *, model: str, engine: str = "0", about: Mapping[str, str] | None = None
    ) -> None:
        """`about`: labels of `octavo_info`, which is left out without any."""
        self._stats = stats_log
        self._about = dict(about or {})
        self._labels = (model, engine)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def render(self) -> bytes:
        """The answer to a scrape, UTF-8; its media type is `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def describe(self) -> list[Metric]:
        """No metric is known before it is collected; keeps registration from collecting."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics; called by the registry on each scrape."""
        if self._about:
            info = GaugeMetricFamily("octavo_info", "What this engine is", labels=(*_LABELS, *self._about))
            info.add_metric((*self._labels, *self._about.values()), 1)
            yield info
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield from self._features()

    def _gauges(self) -> Iterator[Metric]:
        s = self._stats.snapshot
        for name, help_text, value in (
            ("engine_up", "1 while the engine is alive", float(self._stats.engine_up)),
            ("requests_running", "Requests that hold a place in the batch", s.num_running),
            ("requests_waiting", "Requests that wait for a place", s.num_waiting),
            ("kv_cache_usage_ratio", "Share of KV blocks held by live requests", s.kv_usage),
            ("kv_blocks_used", "KV blocks held by live requests", s.num_blocks_used),
            ("kv_blocks", "KV blocks in all", s.num_blocks_total),
        ):
            gauge = GaugeMetricFamily(f"octavo_{name}", help_text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        s = self._stats.snapshot
        finished = CounterMetricFamily("octavo_requests_finished", "Answers that ended", labels=(*_LABELS, "reason"))
        for reason, count in self._stats.finished.items():
            finished.add_metric((*self._labels, reason.value), count)
        yield finished
        for name, help_text, value in (
            ("requests_refused", "Requests turned away because too many waited", self._stats.num_refused),
            ("prompt_tokens", "Prompt tokens of requests that got a first token", s.prompt_tokens),
            ("output_tokens", "Tokens generated", s.output_tokens),
            ("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache", s.prefix_queries),
            ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", s.prefix_hits),
            ("prefix_cache_shared_tokens", "Prompt tokens that further answers took from the first", s.prefix_shared),
            ("prefix_cache_resumed_tokens", "Tokens that preempted requests found again", s.prefix_resumed),
            ("preemptions", "Requests that lost their place and start again", s.preemptions),
        ):
            counter = CounterMetricFamily(f"octavo_{name}", help_text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter

    def _histograms(self) -> Iterator[Metric]:
        b = self._stats
        for name, help_text, histogram in (
            ("queue_seconds", "From the queue to the first scheduled step", b.queue_s),
            ("prefill_seconds", "From the first scheduled step to the first token", b.prefill_s),
            ("time_to_first_token_seconds", "From arrival to the first token", b.first_token_s),
            ("inter_token_seconds", "Between successive outputs of a request", b.inter_token_s),
            ("decode_seconds", "From the first token to the end", b.decode_s),
            ("end_to_end_seconds", "From arrival to the end", b.end_to_end_s),
            ("request_prompt_tokens", "Prompt length of a request", b.prompt_tokens),
            ("request_output_tokens", "Length of an answer", b.output_tokens),
            ("step_seconds", "One step of the engine", b.step_s),
            ("step_tokens", "Tokens computed in one step", b.step_tokens),
        ):
            yield self._histogram(f"octavo_{name}", help_text, histogram)

    def _histogram(self, name: str, help_text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, help_text, labels=_LABELS)
        buckets = [("+Inf" if bound == float("inf") else f"{bound:g}", n) for bound, n in histogram.cumulative()]
        family.add_metric(self._labels, buckets, histogram.sum)
        return family

    def _features(self) -> Iterator[Metric]:
        plain = GaugeMetricFamily(
            "octavo_feature_metric", "A metric of a feature", labels=(*_LABELS, "feature", "metric")
        )
        labelled: dict[tuple[str, str], CounterMetricFamily | GaugeMetricFamily] = {}
        for feature, metrics in sorted(self._stats.snapshot.parts.items()):
            for metric, value in sorted(metrics.items()):
                what, brace, rest = metric.partition("{")
                if not brace:
                    plain.add_metric((*self._labels, feature, metric), value)
                    continue
                label, _, thing = rest.removesuffix("}").partition("=")
                if (what, label) not in labelled:
                    text = f"A metric of the feature {feature}; see its guide"
                    labelled[what, label] = _family(f"octavo_{what}", text, (*_LABELS, label))
                labelled[what, label].add_metric((*self._labels, thing), value)
        yield plain
        yield from labelled.values()


def _family(name: str, text: str, labels: tuple[str, ...]) -> CounterMetricFamily | GaugeMetricFamily:
    if name.endswith("_total"):
        return CounterMetricFamily(name, text, labels=labels)
    return GaugeMetricFamily(name, text, labels=labels)
