"""Chat templates as code: compiled in a sandbox, and asked what they expect.

Promises: the language that Transformers documents for chat templates (immutable sandbox, trimmed blocks,
loop controls, `raise_exception`, `strftime_now`, `tojson` without ASCII escapes, the `generation` tag).
Does not know: messages, models, or clients.

Source: Hugging Face's documentation of chat templates, "Writing a chat template".
"""

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from octavo.inputs.verbatim import dumps

_ESCAPED_MARK = re.compile(
    r"\\udb8[0-3]\\ud[c-f][0-9a-f]{2}"
)  # our own marks lie in a private plane, and stay as they are


class TemplateRefusal(TemplateError):
    """The template called `raise_exception`; the message is its own."""


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model wrote; here only its text matters."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        """The body in a scope of its own, as in Transformers, where it is a call block."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateNamespace(Namespace):
    """A namespace that takes no underscored names, which lead to the interpreter's insides."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise TemplateError(f"a namespace cannot hold the name {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as people write it; Jinja's own filter escapes for HTML."""
    text = dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED_MARK.sub(lambda m: str(json.loads(f'"{m[0]}"')), text) if ensure_ascii else text


def make_environment(now: Callable[[], datetime] = datetime.now) -> ImmutableSandboxedEnvironment:
    """The environment of all templates; `now` gives `strftime_now` its moment, in local time."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    environment.globals["namespace"] = TemplateNamespace
    return environment


class CompiledTemplate:
    """One template: its code, and what its text says about the messages it wants.

    Owns: nothing mutable; it may render in several threads at once.
    """

    def __init__(self, source: str, environment: ImmutableSandboxedEnvironment) -> None:
        """Raises `jinja2.TemplateSyntaxError` for a template that does not compile."""
        tree = environment.parse(source)
        self._template: Template = environment.from_string(source)
        self.source = source
        self.iterates_content = _iterates_content(tree)
        self.tests_content_type = any(
            test.name in ("string", "sequence", "iterable", "mapping") and _is_content(test.node)
            for test in tree.find_all(nodes.Test)
        )
        self.tests_content_none = any(
            test.name == "none" and _is_content(test.node) for test in tree.find_all(nodes.Test)
        )
        self.knows_developer = any(c.value == "developer" for c in tree.find_all(nodes.Const))
        self.variables = frozenset(meta.find_undeclared_variables(tree))  # last, since it folds constants in the tree

    def render(self, **variables: Any) -> str:
        """The text for these variables; raises whatever the template raises."""
        return self._template.render(**variables)


def _is_content(node: nodes.Node) -> bool:
    """True for `x.content`, `x['content']`, a variable called content, and slices and filters of these."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Const):
            return bool(node.arg.value == "content")
        return isinstance(node.arg, nodes.Slice) and _is_content(node.node)
    if isinstance(node, nodes.Filter):
        return node.node is not None and node.name in ("selectattr", "rejectattr", "list") and _is_content(node.node)
    return isinstance(node, nodes.Name) and node.name == "content"


def _iterates_content(tree: nodes.Template) -> bool:
    """True when the template walks through the parts of a message's content (INP-12)."""
    aliases = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in aliases)
        for loop in tree.find_all(nodes.For)
    )
