"""The whole HTTP door over the toy engine, for these tests.

Promises: everything between the socket and `EngineClient` is the real thing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from octavo.config.schema import ServerConfig
from octavo.entrypoints.http.app import create_app
from octavo.inputs.chat import ChatTemplate
from octavo.inputs.limits import RequestLimits
from octavo.inputs.renderer import Renderer
from octavo.observe.stats import StatsLog
from octavo.plugins.features import joined
from octavo.serving.async_engine import AsyncEngine
from octavo.serving.cache_feed import Feed, NoFeed
from octavo.serving.frontend import Frontend
from octavo.serving.info import EngineInfo
from tests.entrypoints.http.toy import EOS, Script, ToyClient, ToyTokenizer, default_script
from tests.support.http_server import serve_app

MODEL = "toy/model"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('tools do not speak here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}(tools {{ tools | length }}){% endif %}{% if mood %}(mood {{ mood }}){% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True)
class Served:
    """A running server and what tests look at."""

    url: str
    engine: ToyClient
    frontend: Frontend
    app: Any
    http: httpx.Client

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body)

    def chat(self, **body: Any) -> httpx.Response:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        return self.http.post("/v1/chat/completions", json=body)


@contextmanager
def toy_server(
    script: Script = default_script,
    *,
    server: ServerConfig | None = None,
    step_s: float = 0.0,
    max_model_len: int = 256,
    template: str = TEMPLATE,
    adds_bos: bool = False,
    defaults: Mapping[str, Any] | None = None,
    max_waiting: int = 64,
    headers: dict[str, str] | None = None,
    feed: Feed | None = None,
    facts: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> Iterator[Served]:
    """Serve a toy model; ends everything when the block ends. `facts`: further fields of its `EngineInfo`."""
    tokenizer = tokenizer or ToyTokenizer(adds_bos=adds_bos)
    client = ToyClient(script, step_s=step_s)
    renderer = Renderer(tokenizer, ChatTemplate({"default": template}), num_threads=2, max_chars=1 << 20)
    limits = RequestLimits(max_model_len=max_model_len, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
    info = EngineInfo(
        model=MODEL,
        served_names=(MODEL, "alias"),
        max_model_len=max_model_len,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=(EOS,),
        default_sampling=defaults or {},
        created_s=1_700_000_000,
        max_waiting_requests=max_waiting,
        **{"features": joined({}), **(facts or {})},
    )
    stats = StatsLog(clock=lambda: 0.0)
    told = NoFeed() if feed is None else feed
    engine = AsyncEngine(client, tokenizer, limits, info, stats=stats, feed=told)
    frontend = Frontend(engine=engine, renderer=renderer, limits=limits, stats=stats, info=info, feed=told)
    app = create_app(frontend, server or ServerConfig())
    try:
        with (
            serve_app(app, before=engine.start, after=engine.stop, grace_s=1) as url,
            httpx.Client(base_url=url, timeout=20.0, headers=headers) as http,
        ):
            yield Served(url, client, frontend, app, http)
    finally:
        renderer.close()
