"""A prompt as caches name it: the hashes of its blocks.

Promises: the same hashes as the engine makes (`kvcache.hashing`), made once for each block size that is asked for.
Does not know: who holds what.
"""

from collections.abc import Sequence

from octavo.base.params import SamplingParams
from octavo.base.requests import EngineRequest
from octavo.kvcache.hashing import BlockHash, HashChain, Sha256Hasher
from octavo.kvcache.published import Mirror

SHAREABLE = Sha256Hasher.name  # others start from a value that only their process knows


class Prompt:
    """Token ids and the salt under which their KV is kept; no tokens where nobody told them.

    Owns: the hashes made so far, by the number of tokens hashed together.
    """

    def __init__(self, token_ids: Sequence[int] = (), cache_salt: str | None = None) -> None:
        self._request = EngineRequest(
            request_id="", prompt_token_ids=tuple(token_ids), sampling=SamplingParams(), cache_salt=cache_salt
        )
        self._hashes: dict[int, list[BlockHash]] = {}

    def hashes(self, hash_block_size: int) -> Sequence[BlockHash]:
        """Of its full blocks."""
        if hash_block_size not in self._hashes:
            chain = HashChain(Sha256Hasher(), hash_block_size, self._request)
            chain.extend(self._request.prompt_token_ids)
            self._hashes[hash_block_size] = chain.hashes
        return self._hashes[hash_block_size]

    def held_by(self, mirror: Mirror) -> int:
        """How many of its tokens, from the first on, that cache is known to hold."""
        scheme = mirror.scheme
        if scheme is None or scheme.hash != SHAREABLE or not self._request.prompt_token_ids:
            return 0
        return mirror.leading(self.hashes(scheme.hash_block_size))
