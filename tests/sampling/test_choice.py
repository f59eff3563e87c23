"""Which sampler serves (QNT-20): the native one where it can, the general one wherever it cannot."""

import pytest

from octavo.base.params import SamplingParams
from octavo.sampling import choice
from octavo.sampling.logprobs import LogprobsMode
from octavo.sampling.processors import Processors
from octavo.sampling.sampler import Sampler


class Processor:
    """A custom station that does nothing."""

    keeps_argmax = True

    def enter(self, slot: int, request_id: str, params: SamplingParams) -> bool:
        return True

    def leave(self, slot: int) -> None:
        return None

    def apply(self, logits: object, rows: object, index: object) -> None:
        return None


def test_the_native_sampler_serves_where_the_core_is_there() -> None:
    native = pytest.importorskip("octavo.sampling.native", exc_type=ImportError)
    assert isinstance(choice.make_sampler(vocab_limit=5), native.NativeSampler)


def test_the_general_sampler_serves_processors_other_devices_and_builds_without_the_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processors = Processors((Processor(),))
    assert isinstance(choice.make_sampler(vocab_limit=5, processors=processors, native=False), Sampler)
    assert isinstance(choice.make_sampler(vocab_limit=5, native=False), Sampler)
    monkeypatch.setattr(choice, "NATIVE", "octavo.no_such_module:NativeSampler")
    assert isinstance(choice.make_sampler(vocab_limit=5, mode=LogprobsMode.RAW_LOGITS), Sampler)
    assert isinstance(choice.make_sampler(vocab_limit=5, processors=processors), Sampler)
