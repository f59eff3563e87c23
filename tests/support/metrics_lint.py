"""What `promtool check metrics` complains about, in Python, for machines without it.

Promises: `complaints` gives one line for each fault of a scrape; none means that promtool has none either.
Does not know: which metrics there should be.
"""

import re

from prometheus_client.parser import text_string_to_metric_families

NOT_BASE_UNITS = {
    "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "percent", "kilobytes", "megabytes",
    "gigabytes", "bits", "kelvin", "fahrenheit",
}  # fmt: skip
ABBREVIATIONS = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "m", "h", "d", "num", "pct"}
TYPES = {"counter", "gauge", "histogram", "summary"}
SUFFIXES = {
    "counter": ("_total", "_created"),
    "histogram": ("_bucket", "_sum", "_count", "_created"),
    "summary": ("_sum", "_count"),
}


def complaints(text: str) -> list[str]:
    """Everything that is wrong with the text of a scrape."""
    found = [line for family in text_string_to_metric_families(text) for line in _of_family(family)]
    declared = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    for name, kind in declared:
        if kind == "counter" and not name.endswith("_total"):
            found.append(f"{name}: a counter ends in _total")
        if kind != "counter" and name.endswith("_total"):
            found.append(f"{name}: only a counter ends in _total")
        if kind not in ("histogram", "summary") and name.endswith(("_count", "_sum", "_bucket")):
            found.append(f"{name}: the ending belongs to histograms")
    names = [name for name, _ in declared]
    found += [f"{name} is declared twice" for name in set(names) if names.count(name) > 1]
    return found


def _of_family(family) -> list[str]:
    found = []
    words = family.name.split("_")
    if not family.documentation.strip():
        found.append(f"{family.name}: no help text")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", family.name):
        found.append(f"{family.name}: not in snake_case")
    found += [f"{family.name}: {word} is not a base unit" for word in words if word in NOT_BASE_UNITS]
    found += [f"{family.name}: {word} is an abbreviation" for word in words if word in ABBREVIATIONS]
    found += [f"{family.name}: its name holds the type {word}" for word in words if word in TYPES]
    for sample in family.samples:
        endings = SUFFIXES.get(family.type, ("",))
        if not any(sample.name == family.name + ending for ending in endings):
            found.append(f"{sample.name}: no sample of the {family.type} {family.name}")
        bad = [name for name in sample.labels if not re.fullmatch(r"[a-z][a-z0-9_]*", name)]
        bad += [name for name in sample.labels if name in ("le", "quantile") and family.type in ("gauge", "counter")]
        found += [f"{sample.name}: the label {name}" for name in bad]
    return found
