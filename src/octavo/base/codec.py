"""Messages to bytes and back: msgpack with tagged unions, a version byte, and arrays out of band.

Promises: what is decoded equals what was encoded, whatever part types features registered; arrays of
more than `INLINE_BYTES` travel as frames of their own without a copy; another version is refused; of a message with
many requests in it, one that cannot be read or written harms no other.
Does not know: sockets (see `engine.process`).

Wire form: frame 0 is one version byte and a msgpack document; an array in it is an extension that holds
dtype, shape and either its bytes or the number of the frame with them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np

from octavo.base.errors import ServerError
from octavo.base.outputs import EngineOutputs, OutputPart, RequestDelta
from octavo.base.requests import EngineRequest, RequestPart, Submit
from octavo.base.step import PlanPart, ResultPart, StepPlan, StepResult
from octavo.base.types import FinishReason

VERSION = 1
INLINE_BYTES = 4096
_ARRAY_INLINE = 1
_ARRAY_FRAME = 2

Frame = bytes | bytearray | memoryview
T = TypeVar("T")
Damaged = Callable[[str, str], None]  # the id of a request whose share of a message is lost, and why


class MessageEncoder:
    """Encodes messages to frames.

    Owns: the msgpack encoder, and the list of frames of the message being encoded. Not thread-safe.
    """

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._hook)

    def encode(self, message: Any) -> list[Frame]:
        """Frames of one message; the first is the head, the others are array bytes."""
        self._frames = []
        head = bytearray([VERSION])
        self._encoder.encode_into(message, head, 1)
        return [head, *self._frames]

    def _hook(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"cannot send a {type(value).__name__}")
        array = np.ascontiguousarray(value)
        header = (array.dtype.str, array.shape)
        if array.nbytes <= INLINE_BYTES:
            return msgspec.msgpack.Ext(_ARRAY_INLINE, msgspec.msgpack.encode((*header, array.tobytes())))
        self._frames.append(array.data.cast("B"))
        return msgspec.msgpack.Ext(_ARRAY_FRAME, msgspec.msgpack.encode((*header, len(self._frames))))


def encode_outputs(encoder: MessageEncoder, outputs: EngineOutputs) -> tuple[list[Frame], tuple[str, ...]]:
    """Frames of one step's outputs, and the ids of requests whose share cannot be sent: each ends with an error
    instead, and the engine should stop it."""
    try:
        return encoder.encode(outputs), ()
    except Exception as error:  # whatever a feature put in there
        fine, lost = [], []
        for delta in outputs.deltas:
            try:
                encoder.encode(delta)
                fine.append(delta)
            except Exception as why:
                lost.append(delta.request_id)
                fine.append(lost_delta(delta.request_id, f"cannot be sent to the server: {why}"))
        if not lost:
            raise ServerError(f"a step's outputs cannot be sent: {error}") from error
        return encoder.encode(msgspec.structs.replace(outputs, deltas=tuple(fine))), tuple(lost)


def lost_delta(request_id: str, why: str) -> RequestDelta:
    """What ends a request whose answer was lost on the way."""
    text = f"an answer of the engine to this request {why}; this request ends here, others go on"
    return RequestDelta(request_id=request_id, finish=FinishReason.ERROR, error=text)


class MessageDecoder(Generic[T]):
    """Decodes frames of messages of one type (a union of tagged structs, usually).

    With `on_damaged`, a request of a `Submit` or a delta of `EngineOutputs` that cannot be read is left out of the
    message and told there. Without it the whole message is refused.

    Owns: the msgpack decoder and the frames of the message being decoded. Not thread-safe.
    """

    def __init__(self, kind: Any, on_damaged: Damaged | None = None) -> None:
        self._on_damaged = on_damaged
        self._frames: Sequence[Frame] = ()
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._typed, ext_hook=self._ext)

    def decode(self, frames: Sequence[Frame]) -> T:
        """The message; raises `ServerError` when it was made by another version or is damaged."""
        head = memoryview(frames[0])
        if not len(head) or head[0] != VERSION:
            found = head[0] if len(head) else "nothing"
            raise ServerError(f"message of protocol version {found}, this process speaks {VERSION}")
        self._frames = frames
        try:
            return self._read(head[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError, ValueError) as error:
            raise ServerError(f"message cannot be decoded: {error}") from error
        finally:
            self._frames = ()

    def _read(self, data: memoryview) -> T:
        try:
            return revive(self._decoder.decode(data))  # type: ignore[no-any-return]
        except (msgspec.MsgspecError, ServerError):
            if self._on_damaged is None or (salvaged := self._salvaged(data, self._on_damaged)) is None:
                raise
            return cast(T, salvaged)

    def _salvaged(self, data: memoryview, on_damaged: Damaged) -> Any:
        """The message with the requests in it that can be read; None when it is one without any."""
        loose = msgspec.msgpack.Decoder(ext_hook=self._ext).decode(data)
        tag = loose.get("type") if isinstance(loose, dict) else None
        if tag == "EngineOutputs":
            return self._typed_all(EngineOutputs, loose, "deltas", RequestDelta, on_damaged)
        if tag == "Submit":
            return self._typed_all(Submit, loose, "requests", EngineRequest, on_damaged)
        return None

    def _typed_all(self, kind: Any, loose: dict[str, Any], field: str, each: Any, on_damaged: Damaged) -> Any:
        found = []
        for item in loose.get(field, ()):
            try:
                found.append(_revive_parts(msgspec.convert(item, each, dec_hook=self._typed)))
            except (msgspec.MsgspecError, ServerError, TypeError, ValueError) as error:
                on_damaged(str(item["request_id"]), str(error))
        rest = msgspec.convert({**loose, field: ()}, kind, dec_hook=self._typed)
        return msgspec.structs.replace(rest, **{field: tuple(found)})

    def _ext(self, code: int, data: memoryview) -> Any:
        dtype, shape, payload = msgspec.msgpack.decode(bytes(data))
        source = payload if code == _ARRAY_INLINE else self._frames[payload]
        array = np.frombuffer(source, dtype=np.dtype(dtype)).reshape(shape)
        array.flags.writeable = False
        return array

    @staticmethod
    def _typed(kind: type, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value
        raise NotImplementedError(f"cannot read a {kind} from {type(value).__name__}")


def part_classes() -> dict[str, type[msgspec.Struct]]:
    """Every part type that is loaded now, by its tag."""
    found: dict[str, type[msgspec.Struct]] = {}
    for base in (RequestPart, OutputPart, PlanPart, ResultPart):
        pending: list[type[msgspec.Struct]] = list(base.__subclasses__())
        while pending:
            kind = pending.pop()
            pending.extend(kind.__subclasses__())
            found[str(kind.__struct_config__.tag)] = kind
    return found


def revive(message: Any) -> Any:
    """Turn parts that came as plain mappings into their own types."""
    if isinstance(message, EngineOutputs):
        if any(d.parts for d in message.deltas):
            return msgspec.structs.replace(message, deltas=tuple(map(_revive_parts, message.deltas)))
    elif isinstance(message, Submit):
        if any(r.parts for r in message.requests):
            return msgspec.structs.replace(message, requests=tuple(map(_revive_parts, message.requests)))
    elif isinstance(message, StepPlan | StepResult):
        return _revive_parts(cast(Any, message))
    return message


M = TypeVar("M", StepPlan, StepResult, EngineRequest, RequestDelta)


def _revive_parts(message: M) -> M:
    if not message.parts:
        return message
    classes = part_classes()
    return msgspec.structs.replace(message, parts=tuple(_revive(p, classes) for p in message.parts))


def _revive(part: Any, classes: dict[str, type[msgspec.Struct]]) -> Any:
    if not isinstance(part, dict):
        return part
    kind = classes.get(part.get("type", ""))
    if kind is None:
        raise ServerError(f"message has a part of type {part.get('type')!r}, which no installed feature knows")
    return msgspec.convert(part, kind, dec_hook=MessageDecoder._typed)
