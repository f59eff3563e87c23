"""`octavo explain-config`: every setting with its value, its source and the reason.

Promises: what is printed is what a start with the same options would use, up to what only a loaded model tells.
Does not know: rules (see `config.resolve`).
"""

import dataclasses
import sys
from functools import partial
from typing import Any

from octavo.config.architectures import PLUGIN_GROUP
from octavo.config.args import Option, engine_config, options, server_config, shown_size
from octavo.config.facts import read_model_facts
from octavo.config.names import EMBEDDED_NAME
from octavo.config.pull import pull_model
from octavo.config.resolve import resolve
from octavo.engine.startup import make_executor, size_text
from octavo.entrypoints.commands.arguments import Call
from octavo.entrypoints.commands.console import progress
from octavo.plugins import features
from octavo.plugins.general import with_required
from octavo.plugins.registry import names_of


def run(call: Call) -> int:
    """Print one line a setting: name, value, where it comes from, and why."""
    config = engine_config(call.given)
    path = pull_model(config.model.model or EMBEDDED_NAME, call.env, progress())
    plugins = with_required(call.env.plugins, config.plugins.require_plugin)
    executor = make_executor(config.device, plugins)
    try:
        device = executor.probe()
    finally:
        executor.stop()
    features.check(config)
    resolved = resolve(
        config,
        read_model_facts(str(path), more=partial(names_of, PLUGIN_GROUP, call.env.plugins)),
        device,
        call.given.sources,
    )
    reasons = {d.field.split(".")[1]: d.why for d in resolved.decisions}
    values = {"server": server_config(call.given)} | {
        name: getattr(resolved.config, name) for name in ("model", "cache", "scheduler", "device", "plugins")
    }
    rows = [("setting", "value", "source", "reason")]
    sections = features.server_sections()
    for name, option in options(sections).items():
        section = values.get(option.section) or config.features.get(option.section) or sections[option.section]()
        value = dataclasses.asdict(section)[name]
        if name == "api_key" and value:
            value = "(hidden)"
        source = "decided" if name in reasons else call.given.sources.get(name, "default")
        rows.append((option.flag, _shown(value, option), source, reasons.get(name, "")))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        line = "  ".join(f"{cell:<{w}}" for cell, w in zip(row[:3], widths, strict=True)) + "  " + row[3]
        sys.stdout.write(line.rstrip() + "\n")
    return 0


def _shown(value: Any, option: Option) -> str:
    """A value as it may be given, and as the page of options has it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    if option.kind == "size":
        exact = shown_size(value)
        return size_text(value).replace(" ", "") if exact == str(value) and value >= 1 << 20 else exact
    if isinstance(value, (tuple, list)):
        return " ".join(str(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
