"""Which sampler serves.

Promises: the native one where the core is there and the logits lie in a CPU's memory; the general one otherwise, and
wherever custom processors are installed, since those change torch tensors between the stations.
Does not know: how either works.
"""

from collections.abc import Sequence
from typing import cast

from octavo.plugins.registry import load_target
from octavo.sampling.logprobs import LogprobsMode
from octavo.sampling.sampler import LogitsProcessor, Sampler, TokenSampler

NATIVE = "octavo.sampling.native:NativeSampler"


def make_sampler(
    *,
    vocab_limit: int,
    processors: Sequence[LogitsProcessor] = (),
    mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    native: bool = True,
) -> TokenSampler:
    """The quickest sampler that can serve; `native` False: never the native one."""
    if native and not processors:
        try:
            return cast(TokenSampler, load_target(NATIVE)(vocab_limit=vocab_limit, mode=mode))
        except ImportError:  # the package was built without the core
            pass
    return Sampler(vocab_limit=vocab_limit, processors=processors, mode=mode)
