"""What each way to keep weights costs in quality: perplexity on a fixed text, and how often the likeliest word is the same.

    make bench-perplexity [MODEL=folder or GGUF file] [ARGS="--tokens 4096 --only int8_per_channel,int4_group"]

The text is cut into windows of 512 tokens, each scored from its second token on. From a GGUF file further files are made
beside the temporary ones of the run: the same values in other block types.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from octavo import LLM, SamplingParams
from octavo.base.gguf import is_gguf

TEXT = Path(__file__).parent.parent / "tests" / "data" / "persuasion.txt"
WINDOW = 512  # tokens
ASYMMETRIC = '{"scheme": "int4_group", "symmetric": false}'


@dataclass(frozen=True)
class Way:
    """One line of the table: `options` for the engine, `blocks` a GGUF type that is made first."""

    name: str
    options: dict[str, Any]
    blocks: str | None = None


FROM_FOLDER = (
    Way("float32", {"dtype": "float32", "quantization": "none"}),
    Way("bfloat16", {"dtype": "bfloat16", "quantization": "none"}),
    Way("bfloat16 with KV in fp8", {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "fp8"}),
    Way("bfloat16 with KV in int8", {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "int8"}),
    Way("int8_per_channel", {"quantization": "int8_per_channel"}),
    Way("int4_group", {"quantization": "int4_group"}),
    Way("int4_group, asymmetric", {"quantization": ASYMMETRIC}),
)
FROM_GGUF = (
    Way("GGUF as it is", {"quantization": "gguf"}),
    *(Way(f"GGUF {name}", {"quantization": "gguf"}, name) for name in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")),
)


@dataclass(frozen=True)
class Score:
    """Of one way: of every scored token its negative log-probability, and the likeliest token there."""

    losses: np.ndarray
    best: np.ndarray
    weight_bytes: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))


def score(model: str, options: dict[str, Any], windows: Sequence[Sequence[int]]) -> Score:
    """Run all windows through one engine."""
    llm = LLM(model, max_model_len=WINDOW + 8, enable_prefix_caching=False, **options)
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, temperature=0)
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": list(window)} for window in windows], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    losses, best = [], []
    for window, output in zip(windows, outputs, strict=True):
        for token, found in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            losses.append(-found[token].logprob)
            best.append(min(found, key=lambda t: found[t].rank))
    return Score(np.array(losses), np.array(best), weight_bytes(llm), seconds)


def weight_bytes(llm: LLM) -> int:
    """What the weights take in memory."""
    return int(llm._open_frontend("perplexity").report.weight_bytes)  # type: ignore[attr-defined]


def requantized(source: Path, kind: str, path: Path) -> Path:
    """A GGUF file with the values of another in blocks of `kind`; plain tensors and metadata are copied."""
    reader, to = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1 or tensor.shape[0] % 32:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def ways(
    model: Path, gguf_file: Path | None, only: Sequence[str], folder: Path
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, model, options) of the lines that were asked for."""
    for way in FROM_FOLDER if not is_gguf(model) else FROM_FOLDER[:2]:
        if not only or way.name in only:
            yield way.name, str(model), way.options
    for way in FROM_GGUF if gguf_file is not None else ():
        if only and way.name not in only:
            continue
        file = gguf_file if way.blocks is None else requantized(gguf_file, way.blocks, folder / f"{way.blocks}.gguf")
        yield way.name, str(file), way.options


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder with float weights, or a GGUF file")
    parser.add_argument("--gguf", help="a GGUF file of the same model, for its lines")
    parser.add_argument("--tokens", type=int, default=1 << 30, help="score at most so many")
    parser.add_argument("--only", default="", help="names of lines, separated by commas")
    call = parser.parse_args()
    only = [name.strip() for name in call.only.split(",") if name.strip()]
    tokenizer = LLM(call.model, max_model_len=64, quantization="none")
    tokens = tokenizer.get_tokenizer().encode(TEXT.read_text(), add_special_tokens=False)[: call.tokens]
    del tokenizer
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    print(f"{TEXT.name}: {len(windows)} windows of {WINDOW} tokens\n")
    print("| weights | perplexity | against the first | same likeliest token | weights, MB | seconds |")
    print("|---|---|---|---|---|---|")
    first: Score | None = None
    gguf_file = Path(call.gguf) if call.gguf else Path(call.model) if is_gguf(call.model) else None
    with tempfile.TemporaryDirectory() as folder:
        for name, model, options in ways(Path(call.model), gguf_file, only, Path(folder)):
            got = score(model, options, windows)
            first = first or got
            change = got.perplexity / first.perplexity - 1
            same = float((got.best == first.best).mean())
            print(
                f"| {name} | {got.perplexity:.3f} | {change:+.2%} | {same:.1%} | {got.weight_bytes / 1e6:.0f} | {got.seconds:.0f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
