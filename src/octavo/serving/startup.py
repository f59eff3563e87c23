"""Front composition root: options -> model on disk -> tokenizer, renderer, limits -> engine, embedded or in a process.

Promises: what can fail fast fails before the engine is given work; an engine's process starts first and imports
while this one reads the model's files; everything a door needs comes back in one bundle; `close()` frees it all.
Does not know: which door asked.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from octavo.base.heap import give_back
from octavo.base.phases import Enter
from octavo.base.types import UsageContext
from octavo.config.architectures import PLUGIN_GROUP
from octavo.config.args import Given, engine_config, given_from_keywords
from octavo.config.env import Env, compute_settings, read_env
from octavo.config.facts import ModelFacts, read_generation_defaults, read_model_facts
from octavo.config.names import EMBEDDED_FILE, EMBEDDED_NAME, EMBEDDED_SAMPLING, hub_name, is_embedded
from octavo.config.pull import pull_model
from octavo.config.schema import EngineConfig
from octavo.config.store import Hold
from octavo.engine.client import EngineClient, InprocClient
from octavo.engine.process import SocketClient
from octavo.engine.spawn import Process, process_ahead
from octavo.engine.startup import StartupReport, build_core
from octavo.inputs.chat import load_chat_template
from octavo.inputs.limits import RequestLimits
from octavo.inputs.renderer import Renderer
from octavo.inputs.tokenizer import Tokenizer, ends_of_generation, load_tokenizer
from octavo.kvcache.published import Scheme
from octavo.observe.log import get_logger
from octavo.observe.stats import StatsLog
from octavo.plugins import features
from octavo.plugins.general import load_general, load_required, with_required
from octavo.plugins.registry import Explained, names_of
from octavo.serving.async_engine import AsyncEngine
from octavo.serving.cache_feed import CacheFeed, Feed, NoFeed
from octavo.serving.frontend import Frontend
from octavo.serving.info import EngineInfo
from octavo.serving.sync_engine import SyncEngine

logger = get_logger(__name__)

Progress = Callable[[str], None]
WARNING = "warning: "  # how a line of progress begins that should be read
CHARS_PER_TOKEN = 16  # more than a prompt that fits the context has, by far
LEAST_CHARS = 1 << 20  # read whatever the context is, so that the answer names tokens
PACKED_FOLDER = "packed"  # within the cache folder


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFrontend:
    """What is known before the engine starts: the model on disk and everything about text."""

    config: EngineConfig  # with the model's path
    sources: Mapping[str, str]
    name: str  # what clients call the model: never a path
    facts: ModelFacts
    tokenizer: Tokenizer
    renderer: Renderer
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, Any]
    selected: tuple[str, ...] | None  # plugins, as in `Env`
    plugins: tuple[Explained, ...]  # that there are, with their states in this process

    @property
    def vocab_size(self) -> int:
        """Ids that may be used are 0 up to this: the tokenizer knows them, and the model has a row for each."""
        return min(self.tokenizer.vocab_size, self.facts.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineFrontend:
    """What the `LLM` class is given."""

    engine: SyncEngine
    renderer: Renderer
    limits: RequestLimits
    info: EngineInfo
    report: StartupReport
    client: EngineClient
    hold: Hold  # on the model's files, for as long as the engine runs

    def close(self) -> None:
        """Stop the engine and free everything; may be called twice."""
        self.engine.close()
        self.renderer.close()
        self.hold.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineFrontend:
    """What the server is given: the bundle for the routes, and what start-up found."""

    frontend: Frontend
    report: StartupReport
    client: EngineClient
    hold: Hold

    def close(self) -> None:
        """Stop the engine and free everything; may be called twice."""
        self.client.close()
        self.frontend.renderer.close()
        self.hold.close()


def prepare(given: Given, env: Env, progress: Progress, enter: Enter) -> PreparedFrontend:
    """Find (or pull) the model and load what concerns text; nothing here is slow but a pull."""
    enter("finding the model")
    config = engine_config(given)
    required = config.plugins.require_plugin or ()
    plugins = load_general(env.plugins, required, progress)
    name = config.model.model or EMBEDDED_NAME
    path = pull_model(name, env, progress)
    enter("reading the model's files")
    facts = read_model_facts(str(path), more=partial(names_of, PLUGIN_GROUP, env.plugins))
    tokenizer = load_tokenizer(str(path), pre_tokenizer=config.model.pre_tokenizer, say=progress)
    template = load_chat_template(str(path), config.model.chat_template)
    eos, defaults = _generation_defaults(config.model.generation_config, str(path), facts, tokenizer)
    if not defaults and path.name == EMBEDDED_FILE and config.model.generation_config == "auto":
        defaults = EMBEDDED_SAMPLING
    eos = tuple(dict.fromkeys((*eos, *ends_of_generation(tokenizer, template.texts))))
    config = _replace_model(config, str(path), env)
    return PreparedFrontend(
        config=config,
        sources=given.sources,
        name=shown_name(name),
        facts=facts,
        tokenizer=tokenizer,
        renderer=Renderer(tokenizer, template, max_chars=max(LEAST_CHARS, CHARS_PER_TOKEN * facts.max_position)),
        eos_token_ids=tuple(i for i in eos if 0 <= i < facts.vocab_size),  # no other is ever sampled
        default_sampling=defaults,
        selected=with_required(env.plugins, required),
        plugins=plugins,
    )


def shown_name(given: str) -> str:
    """What clients are shown of a model that was given as `given`: of a path, the folder's or the file's own name."""
    path = Path(given).expanduser()
    if not path.exists():
        return given if is_embedded(given) else str(hub_name(given))
    path = path if path.name not in ("", "..") else path.resolve()
    return path.name.removesuffix(".gguf") or given


def _generation_defaults(
    option: str, path: str, facts: ModelFacts, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """EOS ids from every place a model states them, and the author's sampling defaults (INP-22)."""
    folder = path if option in ("auto", "neutral") else option
    eos, defaults = read_generation_defaults(folder, neutral=option == "neutral")
    ids = dict.fromkeys((*eos, *facts.eos_token_ids))
    if tokenizer.eos_token_id is not None:
        ids[tokenizer.eos_token_id] = None
    return tuple(ids), defaults


def _replace_model(config: EngineConfig, path: str, env: Env) -> EngineConfig:
    """The configuration with the paths that only this side knows."""
    cache = config.model.weight_cache
    folder = str(env.cache_dir / PACKED_FOLDER) if cache == "auto" else cache
    return dataclasses.replace(config, model=dataclasses.replace(config.model, model=path, weight_cache=folder))


def start_client(
    prepared: PreparedFrontend, progress: Progress, enter: Enter, *, env: Env, process: Process | None = None
) -> tuple[EngineClient, StartupReport]:
    """Start the engine, in `process` or in this one."""
    vocab = prepared.vocab_size
    enter("starting the engine")
    if process is not None:
        client = SocketClient(
            prepared.config,
            progress,
            sources=prepared.sources,
            sample_vocab_size=vocab,
            plugins=prepared.selected,
            debug=env.debug,
            process=process,
            enter=enter,
        )
        return client, client.wait_ready()
    with compute_settings():
        load_required(prepared.config.plugins.require_plugin or ())
        started = build_core(
            prepared.config,
            progress,
            sources=prepared.sources,
            sample_vocab_size=vocab,
            plugins=prepared.selected,
            enter=enter,
        )
    return InprocClient(started.core), started.report


def _info(prepared: PreparedFrontend, report: StartupReport, usage: UsageContext) -> EngineInfo:
    config = prepared.config
    return EngineInfo(
        model=prepared.name,
        served_names=config.model.served_model_name or (prepared.name,),
        max_model_len=report.max_model_len,
        vocab_size=prepared.vocab_size,
        eos_token_ids=prepared.eos_token_ids,
        block_size=report.block_size,
        num_kv_blocks=report.num_kv_blocks,
        default_sampling=prepared.default_sampling,
        created_s=int(time.time()),
        engine_seed=config.model.seed,
        usage=usage,
        max_waiting_requests=config.scheduler.max_waiting_requests,
        hang_timeout_s=config.device.hang_timeout_s,
        features=features.joined(config.features),
        heeds_priority=config.scheduler.scheduling_policy == "priority",
        plugins=prepared.plugins,
    )


def _limits(prepared: PreparedFrontend, report: StartupReport) -> RequestLimits:
    return RequestLimits(
        max_model_len=report.max_model_len, vocab_size=prepared.vocab_size, tokenizer=prepared.tokenizer
    )


def open_offline(
    options: Mapping[str, Any], progress: Progress | None = None, env: Env | None = None
) -> OfflineFrontend:
    """An engine for Python, in this process unless `multiprocessing` was asked for.

    `options` are keywords by the schema's names.
    """
    env = env or read_env()
    progress = _each_warning_once(progress or _warnings_only)
    given = given_from_keywords(
        options, features.engine_sections(), env, others=features.all_sections, missing=features.absent
    )
    for notice in given.notices:
        progress(f"{WARNING}{notice}")
    with process_ahead(given.values.get("multiprocessing", False)) as process:
        prepared = prepare(given, env, progress, _nobody)
        client, report = start_client(prepared, progress, _nobody, env=env, process=process)
    info = _info(prepared, report, UsageContext.LLM_CLASS)
    limits = _limits(prepared, report)
    return OfflineFrontend(
        engine=SyncEngine(client, prepared.tokenizer, limits, info),
        renderer=prepared.renderer,
        limits=limits,
        info=info,
        report=report,
        client=client,
        hold=_hold(prepared, env),
    )


def open_online(
    given: Given,
    progress: Progress,
    env: Env,
    usage: UsageContext = UsageContext.API_SERVER,
    *,
    process: Process | None = None,
    enter: Enter | None = None,
) -> OnlineFrontend:
    """An engine for asynchronous doors, in a process of its own unless `--no-multiprocessing`.

    `process` is one that the caller has started ahead and ends if this fails; one is started here otherwise.
    `enter` hears of each phase.
    """
    progress, enter = _each_warning_once(progress), enter or _nobody
    own = process is None and engine_config(given).device.multiprocessing
    with process_ahead(own) as ahead:
        prepared = prepare(given, env, progress, enter)
        client, report = start_client(prepared, progress, enter, env=env, process=process or ahead)
    enter("opening the server")
    give_back()
    info = _info(prepared, report, usage)
    limits = _limits(prepared, report)
    stats = StatsLog()
    feed = _feed(prepared.config, report)
    frontend = Frontend(
        engine=AsyncEngine(client, prepared.tokenizer, limits, info, stats=stats, feed=feed),
        renderer=prepared.renderer,
        limits=limits,
        stats=stats,
        info=info,
        feed=feed,
    )
    return OnlineFrontend(frontend=frontend, report=report, client=client, hold=_hold(prepared, env))


def _hold(prepared: PreparedFrontend, env: Env) -> Hold:
    return Hold(env.cache_dir, Path(prepared.facts.source))


def _feed(config: EngineConfig, report: StartupReport) -> Feed:
    """Where followers of the prefix cache come, when there is something to follow."""
    if not config.cache.kv_events:
        return NoFeed()
    scheme = Scheme(
        hash=config.cache.prefix_hash, hash_block_size=report.hash_block_size, block_size=report.first_block_size
    )
    return CacheFeed(scheme)


def _each_warning_once(progress: Progress) -> Progress:
    """The front and the engine's process load the same plugins, and find the same faults."""
    told: set[str] = set()

    def show(line: str) -> None:
        if line not in told:
            progress(line)
        if line.startswith(WARNING):
            told.add(line)

    return show


def _nobody(phase: str) -> None:
    """Where no one asks how far a start is."""


def _warnings_only(line: str) -> None:
    """Progress for a script: only what its author should know."""
    if line.startswith(WARNING):
        logger.warning("%s", line.removeprefix(WARNING))
