"""`octavo plan`: weights, KV cache and concurrency of a model on a given memory, without reading its weights.

Promises: figures come from the layers themselves, built on the meta device: there is no second table of formulas
(REQ-18). What one step needs beside weights and cache is measured only at a real start, and left out here.
Does not know: architectures.
"""

import dataclasses
import json
import sys
from functools import partial
from typing import Any

from octavo.base.errors import ConfigError, UsageError
from octavo.base.kvspec import KVLayout
from octavo.config.architectures import PLUGIN_GROUP
from octavo.config.args import engine_config, parse_count, parse_size
from octavo.config.facts import DeviceFacts, read_model_facts
from octavo.config.names import EMBEDDED_NAME
from octavo.config.pull import pull_model
from octavo.config.resolve import Resolved, resolve
from octavo.config.schema import EngineConfig
from octavo.engine.startup import decide_layout, make_executor, size_text, worker_config
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.commands.console import progress
from octavo.executor.api import LoadReport, ProfileReport
from octavo.inputs.tokenizer import tokenizer_warning
from octavo.kvcache.groups import blocks_needed
from octavo.plugins import features
from octavo.plugins.general import with_required
from octavo.plugins.registry import names_of

DEFAULT_LENGTHS = (512, 2048, 8192, 32768)
_KINDS = {"FullAttentionSpec": "full attention", "SlidingWindowSpec": "a sliding window"}


def run(call: Call) -> int:
    """Print the plan."""
    config, lengths = engine_config(call.given), _lengths(call.arguments.lengths)
    path = pull_model(config.model.model or EMBEDDED_NAME, call.env, progress())
    facts = read_model_facts(str(path), more=partial(names_of, PLUGIN_GROUP, call.env.plugins))
    features.check(config)
    plugins = with_required(call.env.plugins, config.plugins.require_plugin)
    executor = make_executor(config.device, plugins)
    try:
        device = _device(executor.probe(), call.arguments.memory)
        resolved = resolve(config, facts, device, call.given.sources)
        described = executor.describe(worker_config(resolved.config, facts, device, plugins=plugins))
    finally:
        executor.stop()
    plan = make_plan(config, resolved, described, device, lengths)
    warning = tokenizer_warning(str(path), config.model.pre_tokenizer)
    plan["warnings"] = [] if warning is None else [warning]
    text = json.dumps(plan, indent=1) if call.arguments.json else "\n".join(_lines(plan))
    sys.stdout.write(text + "\n")
    return 0


def _device(found: DeviceFacts, memory: str | None) -> DeviceFacts:
    """This machine, or one with the memory that was asked about."""
    if memory is None:
        return found
    size = parse_size(memory, "--memory")
    return dataclasses.replace(found, memory_total_bytes=size, memory_available_bytes=size)


def _lengths(text: str | None) -> tuple[int, ...]:
    if text is None:
        return DEFAULT_LENGTHS
    found = tuple(parse_count(part, "--lengths") for part in text.split(","))
    if min(found) < 1:
        raise UsageError(f"--lengths must be at least 1 token each, got {text}.")
    return found


def make_plan(
    config: EngineConfig, resolved: Resolved, described: LoadReport, device: DeviceFacts, lengths: tuple[int, ...]
) -> dict[str, Any]:
    """The plan as plain values; bytes and tokens. Raises `ConfigError` when the weights alone do not fit."""
    left = device.memory_available_bytes - described.weight_bytes
    if left <= 0:
        raise ConfigError(
            f"the weights take {size_text(described.weight_bytes)}, more than the {size_text(device.memory_available_bytes)} "
            "of memory; take a smaller model or --dtype."
        )
    profile = ProfileReport(peak_activation_bytes=0, available_bytes=left, seconds=0.0)
    fit_length = config.model.max_model_len is None
    layout, max_len = decide_layout(resolved.config, described, profile, device, fit_length=fit_length)
    batched = resolved.config.scheduler.max_num_batched_tokens or 0
    shown = sorted({n for n in lengths if n <= max_len} | {max_len})
    return {
        "dtype": resolved.config.model.dtype,
        "quantization": resolved.config.model.quantization,
        "attention_backend": described.attention_backend,
        "weight_bytes": described.weight_bytes,
        "kv_bytes": layout.total_bytes,
        "kv_bytes_per_token": _bytes_per_token(layout),
        "block_sizes": [g.spec.block_size for g in layout.groups],
        "num_kv_blocks": layout.num_blocks - 1,
        "groups": [{"kind": type(g.spec).__name__, "layers": len(g.layers)} for g in layout.groups],
        "padding_share": layout.padding_share,
        "max_model_len": max_len,
        "max_num_seqs": resolved.config.scheduler.max_num_seqs,
        "concurrency": {str(n): round((layout.num_blocks - 1) / blocks_needed(layout, n, batched), 2) for n in shown},
    }


def _bytes_per_token(layout: KVLayout) -> float:
    """Of a token that every layer keeps."""
    return sum(len(g.layers) * g.spec.page_bytes / g.spec.block_size for g in layout.groups)


def _form(plan: dict[str, Any]) -> str:
    """How weights are kept, and what they are computed in where that is another type."""
    dtype, kept = plan["dtype"], plan["quantization"]
    if kept in (None, "none"):
        return f" in {dtype}"
    return f" as {'GGUF types' if kept == 'gguf' else kept}, computed in {dtype}"


def _lines(plan: dict[str, Any]) -> list[str]:
    groups = ", ".join(f"{g['layers']} layers with {_KINDS.get(g['kind'], g['kind'])}" for g in plan["groups"])
    lines = [
        f"weights        {size_text(plan['weight_bytes'])}{_form(plan)}",
        f"KV cache       {size_text(plan['kv_bytes'])} in {plan['num_kv_blocks']:,} blocks of "
        f"{'/'.join(str(n) for n in sorted(set(plan['block_sizes'])))} tokens; {plan['kv_bytes_per_token'] / 1024:.1f} KiB a token",
        f"groups         {groups}; padding {plan['padding_share']:.1%}",
        f"attention      {plan['attention_backend']}",
        f"context        {plan['max_model_len']:,} tokens",
    ]
    lines += [f"  at {int(n):>8,} tokens: {count:,.1f} requests fit" for n, count in plan["concurrency"].items()]
    lines.append(f"at once        {plan['max_num_seqs']:,} requests at most (--max-num-seqs)")
    return lines + [f"warning        {warning}" for warning in plan["warnings"]]
