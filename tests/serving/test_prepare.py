"""What is known of a model before its engine starts."""

import pytest

from octavo.config.args import given_from_keywords
from octavo.config.env import read_env
from octavo.plugins.features import engine_sections
from octavo.serving.startup import prepare
from tests.support import checkpoints
from tests.support.smollm2 import smollm2_gguf


def defaults(model, **options):
    """Sampling defaults in force for a model."""
    given = given_from_keywords({"model": str(model), **options}, engine_sections(), read_env({}))
    prepared = prepare(given, read_env({"OCTAVO_PLUGINS": ""}), lambda line: None, lambda phase: None)
    prepared.renderer.close()
    return dict(prepared.default_sampling)


@pytest.mark.parametrize(
    ("option", "expected"), [({}, {"temperature": 0.2, "top_p": 0.9}), ({"generation_config": "neutral"}, {})]
)
def test_the_built_in_model_has_its_author_s_sampling_at_every_door(option, expected):
    """F59, INP-22."""
    assert defaults(smollm2_gguf(), **option) == expected


def test_another_model_without_advice_keeps_neutral_sampling():
    """F59: only the terminal is careful by itself; a server's defaults are OpenAI's."""
    assert defaults(checkpoints.tiny_llama()) == {}
