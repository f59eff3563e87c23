"""`octavo bench compare`: the same work on every engine that is installed here, in turns (OPS-9).

Promises: engines take turns within each round, so that a slow spell of the machine hits all of them; each runs alone;
everything is asked through HTTP by one client; what fails is reported and the rest goes on.
Does not know: how an engine is started (`peers`), what is sent (`works`), or how the table is made (`standings`).
"""

import argparse
import contextlib
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from octavo.base.errors import ConfigError, OctavoError
from octavo.bench.load import LoadTarget, run_load
from octavo.bench.peers.api import GGUF_TYPES, WIDTHS, Checkpoint, Peer, ServerNeed, lacking, read_shape
from octavo.bench.peers.llamacpp import LlamaCppPeer
from octavo.bench.peers.octavo import OctavoPeer
from octavo.bench.peers.process import MemoryWatch, Server, free_port, running
from octavo.bench.peers.transformers import TransformersPeer
from octavo.bench.peers.vllm import VllmPeer
from octavo.bench.records import About, BenchRun, Probed, RecordLog, plain_sample
from octavo.bench.roof import Roof, probe
from octavo.bench.samples import LoadResult
from octavo.bench.standings import best_capacity, failures, median_roof, rows, table
from octavo.bench.workloads import Workload
from octavo.bench.works import CAPACITY, MANY, Measured, Sender, Work, capacity, first_light, warm_up, works

FOLDERS = {"smollm2": "smollm2-135m-bf16", "1b": "llama3.2-1b-shape"}
VLLM_MODES = {"compiled": ("vllm",), "eager": ("vllm-eager",), "both": ("vllm", "vllm-eager")}
WORK_NAMES = tuple(f"W{i}" for i in range(1, 8))
EXIT_FAILED = 1
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    works: Mapping[str, Work]
    models: Sequence[Checkpoint]
    widths: Sequence[str]
    peers: Sequence[Peer]
    rounds: int
    rate: float | None  # W5's capacity, when it is given
    start_timeout_s: float
    answer_timeout_s: float
    logs: Path
    extra_args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by peer


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `octavo bench compare`."""
    add = parser.add_argument
    add("--works", default=",".join(WORK_NAMES), metavar="W1,W2,...", help="works to run (default: all)")
    add("--models", default="smollm2", metavar="NAME,...", help="models: smollm2, 1b, or names given by --folder")
    add("--widths", default="bf16", metavar="WIDTH,...", help="widths: bf16, int8, int4 (default: bf16)")
    add(
        *("--peers",),
        default="octavo,vllm,llamacpp,transformers",
        metavar="NAME,...",
        help="engines, of octavo, vllm, llamacpp, transformers (default: all)",
    )
    add("--vllm-mode", choices=sorted(VLLM_MODES), default="both", help="how vLLM runs the model (default: both)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of every engine (default: 3)")
    add("--peers-dir", default="~/peers", metavar="DIR", help="where scripts/peers/setup.sh put the engines and models")
    add("--folder", action="append", default=[], metavar="NAME=DIR", help="folder of a model; may be repeated")
    add(
        *("--peer-args",),
        action="append",
        default=[],
        metavar="NAME=ARGS",
        help="more arguments for an engine's server, after those it has, to try what is best; may be repeated",
    )
    add("--out", metavar="FILE", help="write every measurement and sample here, a JSON object a line")
    add("--append", action="store_true", help="go on with --out: what it has is not measured again")
    add("--table", action="store_true", help="measure nothing; print the table of --out")
    add("--w5-requests", type=int, default=100, metavar="N", help="requests at each of W5's rates (default: 100)")
    add("--w5-rate", type=float, metavar="R", help="W5's full load, requests per second; measured when not given")
    add("--start-timeout-s", type=float, default=600.0, metavar="S", help="longest start of an engine (default: 600)")
    add("--answer-timeout-s", type=float, default=900.0, metavar="S", help="longest single answer (default: 900)")


def run_compare(args: argparse.Namespace) -> int:
    """Measure and print; 1 when some measurement failed."""
    plan = make_plan(args)
    if (args.append or args.table) and args.out is None:
        raise ConfigError("--append and --table read the file of earlier measurements; name it with --out FILE.")
    records = RecordLog(Path(args.out) if args.out else None, append=args.append or args.table)
    if not args.table:
        with _terminates_as_interrupted():
            Comparison(plan, records, say=_to_stderr).run(vars(args))
    return report(plan, records, _to_stdout)


def make_plan(args: argparse.Namespace) -> Plan:
    """The plan that the options ask for; raises `ConfigError` for names that do not exist."""
    home = Path(args.peers_dir).expanduser().resolve()
    all_works = works(args.w5_requests)
    if args.rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {args.rounds}.")
    wanted = _names("--works", args.works, WORK_NAMES)
    return Plan(
        works={name: work for name, work in all_works.items() if name in wanted},
        models=_models(args, home),
        widths=_names("--widths", args.widths, WIDTHS),
        peers=_peers(args, home),
        rounds=args.rounds,
        rate=args.w5_rate,
        start_timeout_s=args.start_timeout_s,
        answer_timeout_s=args.answer_timeout_s,
        logs=home / "logs",
        extra_args=_extra_args(args.peer_args),
    )


def _models(args: argparse.Namespace, home: Path) -> list[Checkpoint]:
    folders = {name: home / "models" / folder for name, folder in FOLDERS.items()}
    for pair in args.folder:
        name, equals, folder = pair.partition("=")
        if not equals or not name or not folder:
            raise ConfigError(f"--folder takes NAME=DIR, such as smollm2=/models/smollm2, got {pair!r}.")
        folders[name] = Path(folder).expanduser().resolve()
    found = []
    for name in _names("--models", args.models, tuple(folders)):
        stem = FOLDERS.get(name, folders[name].name)
        gguf = {w: home / "models" / "gguf" / f"{stem}.{kind}.gguf" for w, kind in GGUF_TYPES.items()}
        found.append(Checkpoint(name=name, folder=folders[name], gguf=gguf, shape=read_shape(folders[name])))
    return found


def _peers(args: argparse.Namespace, home: Path) -> list[Peer]:
    made: dict[str, Peer] = {
        "octavo": OctavoPeer(),
        "vllm": VllmPeer(home, eager=False),
        "vllm-eager": VllmPeer(home, eager=True),
        "llamacpp": LlamaCppPeer(home),
        "transformers": TransformersPeer(home),
    }
    names = _names("--peers", args.peers, ("octavo", "vllm", "llamacpp", "transformers"))
    return [made[peer] for name in names for peer in (VLLM_MODES[args.vllm_mode] if name == "vllm" else (name,))]


def _extra_args(pairs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Arguments by peer from `NAME=ARGS`, split as a shell splits them."""
    known = ("octavo", *VLLM_MODES["both"], "llamacpp", "transformers")
    found: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in known:
            raise ConfigError(f"--peer-args takes NAME=ARGS with NAME one of {', '.join(known)}, got {pair!r}.")
        found[name] = (*found.get(name, ()), *shlex.split(text))
    return found


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """A comma-separated list of known names, each once."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        raise ConfigError(f"{option} takes {', '.join(known)}, got {', '.join(wrong) or 'nothing'!r}.")
    return names


class Comparison:
    """One session of measurements.

    Owns: nothing but the book it writes to; servers live inside one call.
    """

    def __init__(
        self,
        plan: Plan,
        records: RecordLog,
        *,
        say: Say,
        send: Callable[[LoadTarget, Workload], LoadResult] = run_load,
        probe_roof: Callable[[], Roof | None] = probe,
    ) -> None:
        self._plan = plan
        self._records = records
        self._say = say
        self._send = send
        self._probe_roof = probe_roof
        self._peers: list[Peer] = []

    def run(self, arguments: Mapping[str, object]) -> None:
        """Measure everything that the book does not have."""
        plan = self._plan
        for peer in plan.peers:
            why = peer.available()
            if why is None:
                self._peers.append(peer)
            else:
                self._say(f"{peer.name} is left out: {why}")
        self._records.add(_about(self._peers, arguments))
        plan.logs.mkdir(parents=True, exist_ok=True)
        for model in plan.models:
            for width in plan.widths:
                self._place(model, width)

    def _place(self, model: Checkpoint, width: str) -> None:
        """All rounds of one model at one width."""
        peers = []
        for peer in self._peers:
            why = lacking(peer, model, width)
            if why is None:
                peers.append(peer)
            elif width in peer.widths:
                self._say(f"{peer.name} is left out for {model.name} {width}: {why}")
        if "W5" in self._plan.works and self._plan.rate is None:
            others = [peer for peer in peers if peer.name != OctavoPeer.name] or peers
            for peer in others:
                self._visit(peer, model, width, MANY, (CAPACITY,), 0)
        for round_ in range(1, self._plan.rounds + 1):
            self._probe(f"{model.name} {width} round {round_}")
            for need, names in self._needs():
                for peer in peers:
                    self._visit(peer, model, width, need, names, round_)
        self._probe("the end")

    def _needs(self) -> Iterator[tuple[ServerNeed, tuple[str, ...]]]:
        """The works by the server they need: one start serves several."""
        needs = dict.fromkeys(work.need for work in self._plan.works.values())
        for need in needs:
            yield need, tuple(name for name, work in self._plan.works.items() if work.need == need)

    def _probe(self, before: str) -> None:
        roof = self._probe_roof()
        if roof is not None:
            self._records.add(Probed(before=before, **msgspec.structs.asdict(roof)))

    def _visit(
        self, peer: Peer, model: Checkpoint, width: str, need: ServerNeed, names: Iterable[str], round_: int
    ) -> None:
        """Start one peer, run what is not done, stop it. A failure is a record for each work it cost."""
        able = [name for name in names if peer.works is None or name in peer.works]
        todo = [name for name in able if not self._records.done(name, model.name, width, peer.name, round_)]
        if not todo:
            return
        for path in peer.files(model, width):
            _read_through(path)
        launch = peer.launch(model, width, need, free_port())
        launch = replace(launch, command=(*launch.command, *self._plan.extra_args.get(peer.name, ())))
        log = self._plan.logs / f"{peer.name}-{model.name}-{width}-{need.slots}x{need.tokens_per_slot}-{round_}.log"
        place = BenchRun(work="", model=model.name, width=width, peer=peer.name, round=round_)
        try:
            with running(launch, log) as server:
                server.wait_ready(self._plan.start_timeout_s)
                while todo:
                    self._measure(server, place, todo.pop(0))
        except (OctavoError, OSError) as error:
            for name in todo:
                self._keep(msgspec.structs.replace(place, work=name, error=str(error)))

    def _measure(self, server: Server, place: BenchRun, name: str) -> None:
        """One work on a running server; a failed run is kept as such, a dead server ends the visit."""
        launch = server.launch
        target = LoadTarget(
            base_url=server.base_url,
            model=launch.model,
            extra=dict(launch.extra),
            timeout_s=self._plan.answer_timeout_s,
        )

        def send(work: Workload) -> LoadResult:
            return self._send(target, work)

        start = time.monotonic()
        try:
            rate = self._rate(place) if name == "W5" else 0.0
            measured = self._metrics(server, send, name, _seed(name, place.round), rate)
        except OctavoError as error:
            self._keep(msgspec.structs.replace(place, work=name, error=str(error)))
            server.check_alive()
            return
        runs = [[plain_sample(msgspec.structs.asdict(s)) for s in result.samples] for result in measured.runs]
        self._keep(
            msgspec.structs.replace(
                place,
                work=name,
                values=dict(measured.values),
                rate=rate or None,
                seconds=time.monotonic() - start,
                requests=runs,
            )
        )

    def _metrics(self, server: Server, send: Sender, name: str, seed: int, rate: float) -> Measured:
        if name == CAPACITY:
            warm_up(send, self._plan.works["W5"], seed + 500)
            return capacity(send, seed)
        work = self._plan.works[name]
        if work.run is None:
            light = first_light(send)
            first_s = light.samples[0].first_token_s
            elapsed_s = server.age_s() - light.samples[0].end_s + (first_s or light.samples[0].end_s)
            return Measured(values={"start_s": (elapsed_s,)}, runs=(light,))
        if name == "W7":
            with MemoryWatch(server) as watch:
                runs = work.run(send, seed, rate).runs
            return Measured(values={"peak_bytes": (float(watch.peak_bytes),)}, runs=runs)
        warm_up(send, work, seed + 500)
        return work.run(send, seed, rate)

    def _rate(self, place: BenchRun) -> float:
        if self._plan.rate is not None:
            return self._plan.rate
        found = best_capacity(self._records.runs, place.model, place.width)
        if found is None:
            raise ConfigError("no engine's capacity could be measured; give it with --w5-rate.")
        return found

    def _keep(self, run: BenchRun) -> None:
        self._records.add(run)
        values = ", ".join(f"{key} {statistics.median(value):.4g}" for key, value in run.values.items())
        place = f"{run.work} {run.model} {run.width} {run.peer} round {run.round}"
        self._say(f"{place}: {values or f'FAILED: {run.error}'} ({run.seconds:.1f} s)")


def report(plan: Plan, records: RecordLog, say: Say) -> int:
    """Print limits, table and failures; the exit code."""
    roof = median_roof(records.probes)
    wanted = {model.name for model in plan.models}
    runs = [
        r for r in records.runs if r.model in wanted and r.width in plan.widths and r.work in {*plan.works, CAPACITY}
    ]
    shapes = {model.name: model.shape for model in plan.models}
    limits = [f"{value:,.1f} {unit}" for value, unit in (
        (roof.read_gb_s, "GB/s read"), (roof.bf16_gflop_s, "GFLOP/s bf16"), (roof.int8_gop_s, "GOP/s int8"),
    ) if value is not None]  # fmt: skip
    say(f"the machine's limits: {', '.join(limits) or 'not probed'}")
    say("")
    say(table(rows(runs, plan.works, shapes, roof)))
    failed = failures(runs)
    for line in failed:
        say(f"FAILED: {line}")
    return EXIT_FAILED if failed else 0


@contextlib.contextmanager
def _terminates_as_interrupted() -> Iterator[None]:
    """While it measures, SIGTERM unwinds as Ctrl-C does, so that no engine is left running."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _seed(name: str, round_: int) -> int:
    """The same prompts for every engine, others in each round and work."""
    return round_ * 10_000 + sum(map(ord, name)) * 10


def _read_through(path: Path) -> None:
    """Bring a file into the page cache, so that no engine's start depends on who came first."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def _about(peers: Sequence[Peer], arguments: Mapping[str, object]) -> About:
    cpu = [line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    memory = [line.split()[1] for line in _lines(Path("/proc/meminfo")) if line.startswith("MemTotal")]
    machine = {
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory_gib": f"{int(memory[0]) / 2**20:.1f}" if memory else "",
        "system": f"{platform.system()} {platform.release()}",
    }
    return About(
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        machine=machine,
        versions={peer.name: _version(peer) for peer in peers},
        arguments={
            key: value for key, value in arguments.items() if isinstance(value, str | int | float | bool | list)
        },
    )


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _version(peer: Peer) -> str:
    try:
        done = subprocess.run(
            peer.version_command(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return " ".join(done.stdout.split())[:200]


def _to_stdout(line: str) -> None:
    sys.stdout.write(line + "\n")


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
