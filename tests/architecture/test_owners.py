"""Rule 3, one owner: a request, the ledger and what they keep are changed by their own methods only (frame 7)."""

import ast

import pytest

from octavo.scheduler import records
from octavo.scheduler.request import Request
from octavo.scheduler.timeline import Timeline
from tests.architecture.test_layers import MODULES

SCHEDULER = "octavo.scheduler"
MUTATORS = {
    *("add", "append", "clear", "difference_update", "discard", "extend", "insert", "intersection_update", "pop"),
    *("popitem", "remove", "reverse", "setdefault", "sort", "symmetric_difference_update", "update"),
}


def tree(module):
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def assigned(cls):
    """Names of `self` that a class assigns."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value)
    }


def is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


LEDGER = next(n for n in tree("scheduler.ledger").body if isinstance(n, ast.ClassDef) and n.name == "Ledger")
FIELDS = {
    *Request.__slots__,
    *Timeline.__slots__,
    *assigned(LEDGER),
    *(name for each in (records.Counters, records.Flight, records.HeldBlocks) for name in each.__slots__),
}


def sees_requests(node):
    """Whether a module imports from the scheduler, for types too: without it, a strictly typed module holds none."""
    for each in ast.walk(node):
        names = [alias.name for alias in each.names] if isinstance(each, ast.Import) else []
        if isinstance(each, ast.ImportFrom):
            names = [each.module or "", *(f"{each.module}.{alias.name}" for alias in each.names)]
        if any(name == SCHEDULER or name.startswith(SCHEDULER + ".") for name in names):
            return True
    return False


def changed(node):
    """The expression that a node changes, in place or by giving its name another value; None: it changes nothing."""
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return node if isinstance(node, ast.Attribute) else node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return node.func.value
    return None


def is_foreign(node, mine):
    """A field of one of the owners, on something else than `self`; `mine`: what stands for `self` beside it."""
    return isinstance(node, ast.Attribute) and node.attr in FIELDS and not is_self(node.value) and (
        ast.unparse(node.value) not in mine
    )  # fmt: skip


def aliases(scope, mine):
    """Local names for a field: `slots = ledger.free_slots`, alone or side by side."""
    found = set()
    for node in ast.walk(scope):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            found |= {t.id for t, value in pairs if isinstance(t, ast.Name) and is_foreign(value, mine)}
    return found


def writes(module_tree, mine=()):
    """Every place of a module that changes a field of an owner from outside."""
    found = set()
    for node in ast.walk(module_tree):
        what = changed(node)
        if (what is not None and is_foreign(what, mine)) or (
            isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("setattr", "__setattr__")
        ):
            found.add((node.lineno, ast.unparse(node)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = aliases(node, mine)
            found |= {
                (each.lineno, ast.unparse(each))
                for each in ast.walk(node)
                if isinstance(it := changed(each), ast.Name) and it.id in names
            }
    return sorted(found)


def test_requests_and_the_ledger_are_changed_by_their_own_methods_only():
    mine = {"scheduler.request": ("self.times",)}  # a request writes its own moments
    seen = [module for module in MODULES if module.startswith("scheduler.") or sees_requests(tree(module))]
    assert {"scheduler.apply", "scheduler.order", "features.transfer.control.offload", "engine.startup"} <= set(seen)
    wrong = {module: found for module in seen if (found := writes(tree(module), mine.get(module, ())))}
    assert wrong == {}


@pytest.mark.parametrize(
    "line",
    [
        "req.slot = 3",
        "req.num_placeholders -= 1",
        "a, req.steady = 1, True",
        "del req.key",
        "req.waits_for.add('x')",
        "req.times.first_token_s = now",
        "self.ledger.stuck = False",
        "self.ledger.requests[name] = req",
        "del ledger.in_prompt[req]",
        "ledger.counters.step_rows += 1",
        "slots = ledger.free_slots; slots.pop()",
        "a, flights = 1, self.ledger.flights; flights[1] = None",
        "[setattr(req, 'slot', None) for req in rows]",
        "for req.slot in range(3): pass",
    ],
)
def test_a_change_from_outside_is_found(line):
    assert len(writes(ast.parse(f"def f(self):\n  {line}"))) >= 1


@pytest.mark.parametrize(
    "line",
    [
        "self.slot = 3",
        "self.requests.pop(1)",
        "slot = req.slot",
        "slots = self.free_slots; slots.pop()",
        "builder.rows_left -= 1",
        "req.end(reason, now)",
        "slots = list(ledger.free_slots); slots.pop()",
        "row.good_units = min(row.good_units, req.num_tokens)",
    ],
)
def test_reading_and_changing_what_is_one_s_own_is_none(line):
    assert writes(ast.parse(f"def f(self):\n  {line}")) == []
