"""Tiers by address: `host?size=8GiB`, `file:///var/cache/octavo?size=100GiB`, `redis://host:6379/0`,
`s3://bucket/prefix?endpoint=URL`, `mooncake://host:50051`, `peer://host:7100`, in order of lookup.

Promises: what is wrong with an address is said in one sentence that names it; both halves of the feature read
addresses and count rows with this module, and so agree.
Does not know: what a tier does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from octavo.base.errors import ConfigError
from octavo.base.kvspec import KVLayout
from octavo.config.args import parse_size
from octavo.features.transfer.plan import Speeds

HOST = "host"
DEFAULT_HOST_BYTES = 1 << 30
WRITTEN = {"policy", "timeout", "thin_below", "full_above"}  # options of every tier that is written to
KNOWN_OPTIONS: dict[str, set[str]] = {
    "host": {"size", "policy", "blocks"},
    "file": {"size", *WRITTEN},
    "redis": WRITTEN,
    "s3": {"endpoint", "region", *WRITTEN},
    "mooncake": WRITTEN,
    "peer": {"timeout", "transport"},
}
MOST_BLOCKS = 64
TCP, NIXL = "tcp", "nixl"  # how another engine's memory is read
DEFAULT_TIMEOUT_S = 10.0
DEFAULT_THIN_BELOW = 20_000_000  # bytes a second
LOCAL, REMOTE = "local", "remote"  # on this machine, or beyond the network
CHUNK, REQUEST = "chunk", "request"  # what a secondary tier is given: what was computed, or all of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class TierAddress:
    """One tier. `place` is a path or a network address; `size` in bytes, None: no limit of ours.

    `policy` is the host tier's way to evict, and for others what they are given: "chunk" or "request".
    `blocks` of KV are one chunk, in every tier. `timeout_s` is for a read or a write. A tier that takes fewer than `thin_below` bytes a second gets fewer writes, and
    all again when it takes more than `full_above`. `transport` is a peer's.
    """

    text: str
    kind: str
    place: str = ""
    size: int | None = None
    policy: str = "lru"
    endpoint: str | None = None
    region: str | None = None
    blocks: int = 1
    transport: str = TCP
    timeout_s: float = DEFAULT_TIMEOUT_S
    thin_below: int = DEFAULT_THIN_BELOW
    full_above: int = 2 * DEFAULT_THIN_BELOW

    @property
    def name(self) -> str:
        """The address without its options."""
        return self.text.partition("?")[0]

    @property
    def locality(self) -> str:
        """Where it is, seen from this machine."""
        return LOCAL if self.kind in (HOST, "file") else REMOTE

    @property
    def names(self) -> frozenset[str]:
        """What a request may call it by."""
        return frozenset({self.name, self.kind} if self.kind == HOST else {self.name, self.kind, self.locality})

    @property
    def is_written(self) -> bool:
        """False where what is there is somebody else's."""
        return self.kind != "peer"


def parse_tiers(texts: tuple[str, ...]) -> tuple[TierAddress, ...]:
    """The host tier first, and the others in the order in which they are asked. Raises `ConfigError`."""
    tiers = [parse_tier(text) for text in texts]
    hosts = [tier for tier in tiers if tier.kind == HOST]
    if len(hosts) > 1:
        raise ConfigError(f"--kv-tier {hosts[1].text}: there is one host tier; give its whole size in one address")
    if not hosts:
        hosts = [TierAddress(text=f"host?size={DEFAULT_HOST_BYTES}", kind=HOST, size=DEFAULT_HOST_BYTES)]
    others = [tier for tier in tiers if tier.kind != HOST]
    names = [tier.name for tier in others]
    if len(set(names)) < len(names):
        raise ConfigError(f"--kv-tier {names[0]}: a tier is given twice")
    return (hosts[0], *others)


def _url(part: str, text: str) -> SplitResult:
    try:
        url = urlsplit(part)
        _ = url.port  # read only when it is asked for
    except ValueError as error:
        raise ConfigError(f"--kv-tier {text}: {part!r} is no URL ({error})") from None
    return url


def parse_tier(text: str) -> TierAddress:
    """One address. Raises `ConfigError`."""
    url = _url(text, text)
    kind = url.scheme or url.path
    if kind not in KNOWN_OPTIONS:
        raise ConfigError(f"--kv-tier {text}: there is no tier {kind!r}; there are {', '.join(sorted(KNOWN_OPTIONS))}")
    pairs = parse_qsl(url.query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(f"--kv-tier {text}: an option is given twice")
    if unknown := sorted(set(options) - KNOWN_OPTIONS[kind]):
        raise ConfigError(
            f"--kv-tier {text}: {kind} has no option {unknown[0]!r}; "
            f"it has {', '.join(sorted(KNOWN_OPTIONS[kind])) or 'none'}"
        )
    size = parse_size(options["size"], f"--kv-tier {text}: size") if "size" in options else None
    place = unquote(url.netloc + url.path) if kind != HOST else ""
    if kind == "file" and not place.startswith("/"):
        raise ConfigError(f"--kv-tier {text}: give the folder as file:///absolute/path")
    if kind == "redis" and not url.hostname:
        raise ConfigError(f"--kv-tier {text}: give the server as redis://host:port/0")
    if kind == "s3" and not url.netloc:
        raise ConfigError(f"--kv-tier {text}: give the bucket as s3://bucket/prefix")
    endpoint = options.get("endpoint")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--kv-tier {text}: the endpoint is a URL such as http://10.0.0.2:9000, got {endpoint!r}")
    if endpoint is not None:
        _url(endpoint, text)
    if kind in ("peer", "mooncake"):
        parse_listen(place, f"--kv-tier {text}")
    if kind == HOST and size is None:
        size = DEFAULT_HOST_BYTES
    if size is not None and size <= 0:
        raise ConfigError(f"--kv-tier {text}: the size must be above 0")
    policy = options.get("policy", "lru" if kind == HOST else CHUNK)
    if kind != HOST and policy not in (CHUNK, REQUEST):
        raise ConfigError(
            f"--kv-tier {text}: the policy is {CHUNK}, for what was newly computed, or {REQUEST}, for all of a "
            f"request; got {policy!r}"
        )
    blocks = options.get("blocks", "1")
    if not (blocks.isascii() and blocks.isdigit() and 1 <= int(blocks) <= MOST_BLOCKS):
        raise ConfigError(f"--kv-tier {text}: blocks of a chunk are 1 to {MOST_BLOCKS}, got {blocks!r}")
    transport = options.get("transport", TCP)
    if transport not in (TCP, NIXL):
        raise ConfigError(f"--kv-tier {text}: the transport is {TCP} or {NIXL}, got {transport!r}")
    timeout_s, thin_below, full_above = _limits(text, options)
    return TierAddress(
        text=text,
        kind=kind,
        place=place,
        size=size,
        policy=policy,
        endpoint=endpoint,
        region=options.get("region"),
        blocks=int(blocks),
        transport=transport,
        timeout_s=timeout_s,
        thin_below=thin_below,
        full_above=full_above,
    )


def _limits(text: str, options: Mapping[str, str]) -> tuple[float, int, int]:
    """Seconds for a read or a write, and bytes a second between which writes are thinned. Raises `ConfigError`."""
    try:
        timeout_s = float(options.get("timeout", DEFAULT_TIMEOUT_S))
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= 3600:
        raise ConfigError(
            f"--kv-tier {text}: the timeout is seconds, above 0 and at most 3600, got {options['timeout']!r}"
        )
    thin_below, full_above = DEFAULT_THIN_BELOW, None
    if "thin_below" in options:
        thin_below = parse_size(options["thin_below"], f"--kv-tier {text}: thin_below")
    if "full_above" in options:
        full_above = parse_size(options["full_above"], f"--kv-tier {text}: full_above")
    full_above = 2 * thin_below if full_above is None else full_above
    if not 0 < thin_below <= full_above:
        raise ConfigError(
            f"--kv-tier {text}: thin_below is bytes a second, above 0 and not above full_above; "
            f"got {thin_below} and {full_above}"
        )
    return timeout_s, thin_below, full_above


def parse_listen(text: str, name: str = "--kv-listen") -> tuple[str, int]:
    """Host and port of "host:port". Raises `ConfigError`."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{name}: give host and port, such as 10.0.0.2:7100; got {text!r}")
    return host, int(port)


def row_bytes(layout: KVLayout, blocks: int = 1) -> int:
    """Bytes of a row: the largest chunk of any group, in whole cache lines."""
    largest = max(chunk_bytes(layout, group.index, blocks) for group in layout.groups)
    return -(-largest // 64) * 64


def chunk_bytes(layout: KVLayout, group: int, blocks: int = 1) -> int:
    """Bytes of a chunk: `blocks` of a group in all its layers."""
    spec = layout.groups[group].spec
    return spec.page_bytes * len(layout.groups[group].layers) * blocks


def num_rows(layout: KVLayout, host: TierAddress) -> int:
    """Chunks that the host tier holds. Raises `ConfigError` when it holds none."""
    needed = row_bytes(layout, host.blocks)
    check_holds_one(host, needed, host.blocks)
    return (host.size or DEFAULT_HOST_BYTES) // needed


def check_holds_one(tier: TierAddress, num_bytes: int, blocks: int = 1) -> None:
    """Raises `ConfigError` for a tier that is smaller than what one chunk, of so many blocks of KV, takes there."""
    if tier.size is not None and tier.size < num_bytes:
        what = "one block of KV takes" if blocks == 1 else f"{blocks} blocks of KV take"
        raise ConfigError(
            f"--kv-tier {tier.text}: {what} {_size(num_bytes)} there, more than the tier's "
            f"{_size(tier.size)}; give it more"
        )


def host_bytes(texts: tuple[str, ...], available: int) -> int:
    """Memory that the host tier takes once it is full, of so many bytes that are to be had, in which there must be room
    for a cache, too. Raises `ConfigError` with the numbers."""
    host = parse_tiers(texts)[0]
    size = host.size or DEFAULT_HOST_BYTES
    if size >= available:
        what = f"--kv-tier {host.text}" if host.text in texts else f"the host tier of --kv-tier {texts[0]}"
        raise ConfigError(
            f"{what}: {_size(size)} is more than the {_size(available)} that are available to this process, and the KV "
            f"cache needs room beside it; give the host tier less, such as host?size={_round(available // 2)}"
        )
    return size


def _round(num_bytes: int) -> str:
    """A size to type, not above this one."""
    gib = num_bytes >> 30
    return f"{gib}GiB" if gib else f"{max(1, num_bytes >> 20)}MiB"


def describe(texts: tuple[str, ...], layout: KVLayout, speeds: Speeds) -> tuple[str, ...]:
    """What each tier holds, for people: one line a tier; and what a hit is worth, where that was measured."""
    size = min(g.spec.block_size for g in layout.groups)
    tiers = parse_tiers(texts)
    unit, per_token = row_bytes(layout, tiers[0].blocks), layout.block_bytes / size
    lines = []
    for tier in tiers:
        holds = "no limit of ours"
        if tier.size is not None:
            holds = f"{_size(tier.size)}, about {int(tier.size // unit * unit / per_token):,} tokens"
        reading = speeds.read_bytes_per_s.get(tier.name, 0.0)
        gives = f"; it gives a block of {size} tokens in {_time(layout.block_bytes / reading)}" if reading else ""
        lines.append(f"KV tier {tier.name}: {holds}{gives}")
    computing, loading = speeds.prompt_tokens_per_s, speeds.load_bytes_per_s
    if computing and loading:
        lines.append(
            f"KV tiers: a block of {size} tokens is computed in about {_time(size / computing)} and copied from the host "
            f"in {_time(layout.block_bytes / loading)}"
        )
    return tuple(lines)


def _time(seconds: float) -> str:
    return (
        f"{seconds:.1f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.2g} ms"
        if seconds < 0.1
        else f"{seconds * 1e3:.0f} ms"
    )


def _size(num_bytes: int) -> str:
    if num_bytes < 100 << 10:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
