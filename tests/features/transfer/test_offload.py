"""With tiers the text is the same, and less of it is computed (TIR-10 .. TIR-18, SCH-13)."""

import hashlib
import json
import queue
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.base.errors import ConfigError
from octavo.base.outputs import EngineOutputs
from octavo.base.requests import EngineRequest
from octavo.base.types import FinishReason
from octavo.config.schema import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.client import InprocClient
from octavo.engine.startup import build_core
from octavo.features.transfer.control import search
from octavo.features.transfer.control.metrics import METRICS
from octavo.features.transfer.data import agent
from octavo.features.transfer.data.regions import HostView, RegionPlace
from octavo.features.transfer.disagg import TransferHint
from octavo.features.transfer.options import TransferOptions
from tests.support import checkpoints

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BASE = {
    "dtype": "float32", "block_size": 16, "num_kv_blocks": 24, "max_model_len": 256, "max_num_batched_tokens": 64,
    "num_threads": 1,
}  # fmt: skip


def prompt(seed, length=200):
    return {"prompt_token_ids": [(seed * 97 + i * 31) % 400 + 10 for i in range(length)]}


# Each prompt alone takes more than half of the cache: when it comes back, its blocks are gone.
TURNS = [prompt(1), prompt(2), prompt(3, 150), prompt(1), prompt(2), prompt(3, 150), prompt(1, 120)]


def figures(parts):
    """The figures of tiers as "<tier>.<figure>"."""
    names = {f"kv_tier_{metric}": figure for figure, metric in METRICS.items()}
    found = {}
    for name, value in parts.get("transfer", {}).items():
        what, _, tier = name.partition("{tier=")
        found[f"{tier.removesuffix('}')}.{names[what]}" if tier else name] = value
    return found


def run(turns=TURNS, path=None, together=False, try_again=1, **options):
    """Token ids of each turn, and of where its prefix came from.

    Models this small are often computed faster than a tier gives; here tiers are asked all the same.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "TRY_AGAIN", try_again)
        with LLM(model=str(path or checkpoints.tiny_llama()), **{**BASE, **options}) as llm:
            batches = [turns] if together else [[turn] for turn in turns]
            outs = [out for batch in batches for out in llm.generate(batch, GREEDY, use_tqdm=False)]
            stats = figures(llm.stats().parts)
    return [out.outputs[0].token_ids for out in outs], [out.cached_by_source or {} for out in outs], stats


@pytest.fixture(scope="module")
def plain():
    return run()[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 24},
        {"enable_prefix_caching": True, "prefix_hash": "sha256", "kv_tier": ("host?size=4MiB&policy=arc",)},
        {"num_kv_blocks": 18},
    ],
    ids=["plain", "two steps in flight", "small chunks", "arc", "hardly any blocks"],
)
def test_a_prefix_that_was_evicted_comes_back_from_the_host(plain, options):
    texts, sources, stats = run(**{"kv_tier": ("host?size=4MiB",), **options})
    assert texts == plain
    assert [source.get("host", 0) for source in sources[:3]] == [0, 0, 0]
    assert all(source.get("host", 0) >= 112 for source in sources[3:6])
    assert stats["host.rows_used"] > 20 and stats["host.hits"] > 20


@pytest.mark.parametrize("blocks", [2, 3])
def test_chunks_of_several_blocks(plain, tmp_path, blocks):
    """TIR-2: in host memory and in files, which are fewer and larger, and nobody else's."""
    tiers = (f"host?size=4MiB&blocks={blocks}", f"file://{tmp_path}")
    texts, sources, stats = run(kv_tier=tiers)
    assert texts == plain and all(source.get("host", 0) >= 96 for source in sources[3:6])
    assert stats["host.rows"] == (4 << 20) // (blocks * 8192)
    found = list(tmp_path.rglob("*.kv"))
    assert 30 // blocks <= len(found) <= 45 // blocks and all(p.stat().st_size > blocks * 8192 for p in found)
    texts, sources, _ = run(TURNS[:2], kv_tier=tiers)
    assert texts == plain[:2] and all(source.get("file", 0) >= 144 for source in sources)
    texts, sources, _ = run(TURNS[:1], kv_tier=("host?size=4MiB", f"file://{tmp_path}"))
    assert texts == plain[:1] and sources[0] == {}


def test_chunks_of_several_blocks_with_sliding_windows():
    """TIR-2."""
    path = checkpoints.tiny_swa(mixed=True)
    want = run(path=path, num_kv_blocks=60)[0]
    texts, sources, _ = run(path=path, num_kv_blocks=60, kv_tier=("host?size=4MiB&blocks=2",))
    assert texts == want and any("host" in source for source in sources)


def test_many_at_once_preempted_and_queued_get_the_same_text(plain):
    texts, sources, _ = run(
        TURNS * 2, together=True, kv_tier=("host?size=4MiB",), num_kv_blocks=30, async_scheduling=True
    )
    assert texts == plain * 2
    assert any("host" in source for source in sources)


def test_a_small_host_tier_keeps_what_fits(plain):
    texts, _, stats = run(kv_tier=("host?size=40KiB",))
    assert texts == plain and 0 < stats["host.rows_used"] <= stats["host.rows"] < 24 and stats["host.evicted"] > 0


def test_sliding_windows():
    path = checkpoints.tiny_swa(mixed=True)
    want = run(path=path, num_kv_blocks=60)[0]
    texts, sources, _ = run(path=path, num_kv_blocks=60, kv_tier=("host?size=4MiB",))
    assert texts == want
    assert any("host" in source for source in sources)


def test_a_file_tier_outlives_the_engine(plain, tmp_path):
    tiers = ("host?size=4MiB", f"file://{tmp_path}?size=64MiB")
    first, _, stats = run(TURNS[:3], kv_tier=tiers)
    assert first == plain[:3] and stats[f"file://{tmp_path}.failed_writes"] == 0
    assert len(list(tmp_path.rglob("*.kv"))) >= 34  # also those of the last answer: the end waits for them
    texts, sources, stats = run(TURNS[:3], kv_tier=tiers)
    assert texts == plain[:3] and stats[f"file://{tmp_path}.hits"] > 20
    assert all(source.get("file", 0) >= 128 for source in sources)


def test_altered_files_are_computed_again(plain, tmp_path):
    tiers = ("host?size=4MiB", f"file://{tmp_path}")
    run(TURNS[:1], kv_tier=tiers)
    paths = sorted(tmp_path.rglob("*.kv"))
    for path in paths[:4]:
        data = bytearray(path.read_bytes())
        data[-9] ^= 4
        path.write_bytes(data)
    texts, _, stats = run(TURNS[:1], kv_tier=tiers)
    assert texts == plain[:1] and stats[f"file://{tmp_path}.failed_reads"] >= 1


def test_another_model_finds_nothing_of_ours(tmp_path):
    other = checkpoints.tiny_llama(seed=5)
    want = run(TURNS[:1], path=other)[0]
    run(TURNS[:1], kv_tier=(f"file://{tmp_path}",))
    texts, _, stats = run(TURNS[:1], path=other, kv_tier=(f"file://{tmp_path}",))
    assert texts == want and stats[f"file://{tmp_path}.hits"] == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kv_tier": ("tape:///x",)}, "there is no tier 'tape'"),
        (
            {"kv_tier": ("host?blocks=2",), "kv_role": "producer", "kv_listen": "127.0.0.1:0"},
            "blocks=2 and --kv-role cannot both be reached at --kv-listen",
        ),
        (
            {"kv_tier": ("host?size=12KiB&blocks=2",)},
            "2 blocks of KV take .* there, more than the tier.s .*; give it more",
        ),
        ({"kv_tier": ("host?size=100",)}, "one block of KV takes .* there, more than the tier.s .*; give it more"),
        ({"kv_tier": ("host",), "enable_prefix_caching": False}, "--kv-tier keeps prefixes"),
    ],
)
def test_what_cannot_be_is_said_at_the_start(options, error):
    with pytest.raises(ConfigError, match=error):
        LLM(model=str(checkpoints.tiny_llama()), **{**BASE, **options})


def test_a_copied_model_finds_what_the_other_left(tmp_path):
    tiers = ("host?size=4MiB", f"file://{tmp_path / 'kv'}")
    model = checkpoints.tiny_llama()
    copied = shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)  # with times of its own
    plain = run(TURNS[:1], path=model, kv_tier=tiers)[0]
    texts, sources, _ = run(TURNS[:1], path=copied, kv_tier=tiers)
    assert texts == plain and sources[0].get("file", 0) >= 128


# ---- what a hit is worth ----------------------------------------------------------------------


def test_the_start_says_what_a_hit_is_worth_and_the_first_lookup_knows_it(plain, monkeypatch):
    with LLM(model=str(checkpoints.tiny_llama()), **BASE, kv_tier=("host?size=4MiB",)) as llm:
        (note,) = [note for note in llm._frontend.report.notes if note.startswith("KV tiers: a block of 16 tokens")]
    assert note.endswith("ms") and " and copied from the host in " in note
    monkeypatch.setattr(agent, "_measure", lambda *_: {"load_bytes_per_s": 1.0, "store_bytes_per_s": 1.0})
    texts, sources, stats = run(kv_tier=("host?size=4MiB",))
    assert texts == plain and not any("host" in source for source in sources)
    assert stats["host.not_worth"] >= 4 and stats["host.hits"] == 0 and stats["host.rows_used"] > 20


# ---- what requests and tiers ask for ----------------------------------------------------------


class Engine:
    """A core whose requests are made by hand, one at a time."""

    def __init__(self, *tiers, num_blocks=24, kv_events=False):
        config = EngineConfig(
            model=ModelConfig(
                model=str(checkpoints.tiny_llama()), dtype="float32", max_model_len=256, weight_cache="off"
            ),
            cache=CacheConfig(num_kv_blocks=num_blocks, block_size=16, kv_events=kv_events),
            features={"transfer": TransferOptions(kv_tier=tiers)} if tiers else {},
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            device=DeviceConfig(num_threads=1),
        )
        self.core = build_core(config, lambda line: None).core
        self.client = InprocClient(self.core)
        self.inbox = queue.SimpleQueue()
        self.hear = lambda outputs: None
        self.count = 0

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(search, "TRY_AGAIN", 1)
        self.client.start(self.inbox.put, self.inbox.put)
        return self

    def __exit__(self, *_):
        self.client.close()
        self.patch.undo()

    def ask(self, turn, **hint):
        """The last delta of a request."""
        self.count += 1
        request = EngineRequest(
            request_id=f"r{self.count}",
            prompt_token_ids=tuple(turn["prompt_token_ids"]),
            sampling=SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
            parts=(TransferHint(hint),) if hint else (),
        )
        self.client.submit((request,))
        while True:
            outputs = self.inbox.get(timeout=60)
            assert isinstance(outputs, EngineOutputs), outputs
            self.hear(outputs)
            for delta in outputs.deltas:
                if delta.request_id == request.request_id and delta.finish is not None:
                    return delta

    def source(self, turn, **hint):
        return {name: n for name, n in (self.ask(turn, **hint).cached_by_source or {}).items() if n}


def files(folder):
    return len(list(Path(folder).rglob("*.kv")))


def test_a_request_is_asked_and_given_the_tiers_that_it_names_and_no_other(tmp_path):
    with Engine("host?size=4MiB", f"file://{tmp_path}") as engine:
        engine.ask(prompt(1), tiers=["host"])
        engine.ask(prompt(2))
    kept = files(tmp_path)
    assert 12 <= kept <= 13  # of the second
    with Engine("host?size=4MiB", f"file://{tmp_path}") as engine:
        assert engine.source(prompt(2), tiers=[]) == {}
        engine.ask(prompt(3), tiers=[])  # takes the blocks
        assert engine.source(prompt(1), tiers=["file"]) == {}
    with Engine("host?size=4MiB", f"file://{tmp_path}") as engine:
        assert engine.source(prompt(2), tiers=["file"])["file"] >= 176
        engine.ask(prompt(3), tiers=[])
        engine.ask(prompt(4), tiers=[])
        assert engine.source(prompt(2), tiers=[f"file://{tmp_path}"])["host"] >= 176  # host memory is always used


@pytest.mark.parametrize("tiers", [(), ("host?size=4MiB",)], ids=["no tier", "host"])
def test_what_the_host_tier_holds_is_told_as_findable(tiers):
    """PDX-2, TIR-4: blocks that left the cache and are in host memory are told until they leave that, too."""
    with Engine(*tiers, kv_events=True) as engine:
        done, wanted = set(), []

        def hear(outputs):
            if (changes := getattr(outputs, "cache", None)) is not None:
                done.clear() if changes.cleared else None
                done.difference_update(changes.removed)
                done.update(changes.stored)

        engine.hear = hear
        for number in (1, 2, 3):
            engine.ask(prompt(number))
            wanted.append(set(done) - set().union(*wanted))
        assert all(len(each) >= 10 for each in wanted)
        assert (wanted[0] <= done) == bool(tiers)  # the cache holds 24 blocks, and each prompt took 12


READER = """
import hashlib
import sys
import msgspec
from octavo.features.transfer.data.regions import HostView, RegionPlace
place = msgspec.json.decode(sys.argv[1], type=RegionPlace)
view = HostView(place)
for row in range(place.num_rows):
    print(hashlib.sha256(view[row][: int(sys.argv[2])]).hexdigest())
"""


def test_another_process_reads_the_host_tier_of_a_running_engine(tmp_path):
    """TIR-1: the primary is memory that other processes reach, row by row, and what is there is what files hold."""
    with Engine("host?size=1MiB", f"file://{tmp_path}") as engine:
        engine.ask(prompt(1))
        end = time.monotonic() + 20
        while files(tmp_path) < 12:
            assert time.monotonic() < end
            time.sleep(0.01)
        place = engine.core.call("worker", {"method": "transfer.place"})
        length = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, width, tokens, bytes: a row has no room beside
        assert place["row_bytes"] == length
        command = [sys.executable, "-c", READER, json.dumps(place), str(length)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        there = set(done.stdout.split())
    kept = [path.read_bytes()[-length:] for path in Path(tmp_path).rglob("*.kv")]
    assert {hashlib.sha256(data).hexdigest() for data in kept} <= there
    with pytest.raises(OSError):
        HostView(RegionPlace(**place))


@pytest.mark.parametrize(
    ("hint", "error"),
    [
        ({"tiers": "file"}, "kv_transfer_params.tiers must be a list of tiers; there are host"),
        ({"tiers": [1]}, "kv_transfer_params.tiers must be a list of tiers; there are host"),
        ({"tiers": ["tape"]}, "kv_transfer_params.tiers: there is no tier 'tape' here; there are host"),
        ({"tier_policy": "all"}, "kv_transfer_params.tier_policy must be chunk or request, got 'all'"),
    ],
)
def test_a_wrong_wish_ends_the_request_with_a_sentence(hint, error):
    with Engine("host?size=4MiB") as engine:
        delta = engine.ask(prompt(1), **hint)
        assert delta.finish is FinishReason.IGNORED and delta.error == error
        assert engine.ask(prompt(1), other="parameters").finish is FinishReason.LENGTH


@pytest.mark.parametrize("by", ["address", "request"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_a_tier_that_wants_all_of_a_request_gets_what_was_found_too(tmp_path, by, where):
    """It was found on the device or in host memory, and the files of it are gone meanwhile (TIR-13)."""
    hint = {"tier_policy": "request"} if by == "request" else {}
    with Engine("host?size=4MiB", f"file://{tmp_path}{'?policy=request' if by == 'address' else ''}") as engine:
        engine.ask(prompt(1))
    assert files(tmp_path) >= 12
    with Engine("host?size=4MiB", f"file://{tmp_path}{'?policy=request' if by == 'address' else ''}") as engine:
        assert engine.source(prompt(1)).get("file", 0) >= 176
        if where == "host":
            engine.ask(prompt(2), tiers=[])
            engine.ask(prompt(3), tiers=[])
        for path in tmp_path.rglob("*.kv"):
            path.unlink()
        assert engine.source(prompt(1), **hint).get(where, 0) >= 176
    assert files(tmp_path) >= 12


def test_a_tier_is_given_only_what_was_computed_when_it_does_not_ask_for_more(tmp_path):
    with Engine("host?size=4MiB", f"file://{tmp_path}") as engine:
        engine.ask(prompt(1))
        end = time.monotonic() + 20
        while files(tmp_path) < 12:
            assert time.monotonic() < end
            time.sleep(0.01)
        for _ in range(2):
            for path in tmp_path.rglob("*.kv"):
                path.unlink()
            assert engine.source(prompt(1))["device"] >= 176
    assert files(tmp_path) <= 1
