"""Messages and replies as bytes on a stream socket.

A frame is two little-endian u32 lengths, a JSON header and a raw payload: `len(header) | len(payload) | header |
payload`. The header is {"kind": class name, "body": fields}; the payload is an adapter chunk's data. Errors travel as
class name, message, remedy and extra fields, and come back as the same class. Floats keep every bit (shortest
round-trip decimals).
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tidemill.core import errors
from tidemill.core.engine_api import Completion, EngineInfo, SleepReport, TokenEvent
from tidemill.core.errors import EngineError, TidemillError
from tidemill.engine import messages as m

_HEAD = struct.Struct("<II")
MAX_HEADER_BYTES = 256 << 20
MAX_PAYLOAD_BYTES = (1 << 32) - 1

_MESSAGES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (m.Generate, m.Score, m.Abort, m.Cancel, m.OpenSession, m.CloseSession, m.BeginAdapter, m.CommitAdapter,
                m.AbortAdapter, m.Sleep, m.Wake, m.Info)
}
_VALUES: dict[str, TypeAdapter[Any]] = {
    "Completion": TypeAdapter(Completion), "EngineInfo": TypeAdapter(EngineInfo),
    "SleepReport": TypeAdapter(SleepReport), "floats": TypeAdapter(tuple[float, ...]), "text": TypeAdapter(str),
    "none": TypeAdapter(None), "Token": TypeAdapter(TokenEvent),
}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(cls) for name, cls in _MESSAGES.items()}
_ERRORS: dict[str, type[TidemillError]] = {
    cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, TidemillError)
}


def encode_message(message: m.Message) -> tuple[bytes, bytes]:
    """(header, payload) of a message to the engine."""
    if isinstance(message, m.AdapterChunk):
        body = {"call_id": message.call_id, "index": message.index, "names": message.names}
        return _header("AdapterChunk", json.dumps(body).encode()), message.data
    kind = type(message).__name__
    return _header(kind, _ADAPTERS[kind].dump_json(message)), b""


def decode_message(header: bytes, payload: bytes) -> m.Message:
    """Raises EngineError on anything that is not a message."""
    kind, body = _open(header)
    if kind == "AdapterChunk":
        fields = json.loads(body)
        return m.AdapterChunk(int(fields["call_id"]), int(fields["index"]), tuple(fields["names"]), payload)
    return _validate(_ADAPTERS, kind, body)


def encode_reply(reply: m.Reply) -> tuple[bytes, bytes]:
    """(header, payload) of a reply from the engine; call ids travel in the kind, so that values need no wrapper."""
    if isinstance(reply, m.Token):
        return _header(f"Token {reply.call_id}", _VALUES["Token"].dump_json(reply.event)), b""
    if isinstance(reply, m.Failure):
        error = reply.error
        extra = {k: v for k, v in vars(error).items() if k not in ("message", "remedy") and isinstance(v, str | int)}
        body = {"error": type(error).__name__, "message": error.message, "remedy": error.remedy, "extra": extra}
        return _header(f"Failure {reply.call_id}", json.dumps(body).encode()), b""
    name = _value_kind(reply.value)
    return _header(f"{name} {reply.call_id}", _VALUES[name].dump_json(reply.value)), b""


def decode_reply(header: bytes) -> m.Reply:
    """Raises EngineError on anything that is not a reply."""
    kind, body = _open(header)
    name, _, call = kind.partition(" ")
    call_id = int(call)
    if name == "Failure":
        fields = json.loads(body)
        cls = _ERRORS.get(fields["error"], EngineError)
        error = cls(fields["message"], remedy=fields["remedy"])
        vars(error).update(fields["extra"])
        return m.Failure(call_id, error)
    value = _validate(_VALUES, name, body)
    return m.Token(call_id, value) if name == "Token" else m.Result(call_id, value)


def frame(header: bytes, payload: bytes) -> bytes:
    """One frame in one buffer (small payloads); large ones are sent by `send_frame` without copying."""
    return _HEAD.pack(len(header), len(payload)) + header + payload


def send_frame(sock: socket.socket, header: bytes, payload: bytes | memoryview) -> None:
    """Write one frame. Raises OSError if the peer is gone."""
    if len(payload) > 1 << 16:
        sock.sendall(_HEAD.pack(len(header), len(payload)) + header)
        sock.sendall(payload)
    else:
        sock.sendall(frame(header, bytes(payload)))


def read_frame(read: Callable[[int], bytes]) -> tuple[bytes, bytes] | None:
    """Next (header, payload) from a blocking `read(n)` that returns fewer than n bytes only at the end of the stream.
    None at a clean end; EngineError if it ends inside a frame or a length is absurd."""
    head = read(_HEAD.size)
    if not head:
        return None
    if len(head) < _HEAD.size:
        raise EngineError("the engine's stream ended inside a frame")
    header_len, payload_len = _HEAD.unpack(head)
    if header_len > MAX_HEADER_BYTES:
        raise EngineError(f"a frame announces a header of {header_len} bytes")
    header, payload = read(header_len), read(payload_len) if payload_len else b""
    if len(header) < header_len or len(payload) < payload_len:
        raise EngineError("the engine's stream ended inside a frame")
    return header, payload


def _header(kind: str, body: bytes) -> bytes:
    return b'{"kind":' + json.dumps(kind).encode() + b',"body":' + body + b"}"


def _open(header: bytes) -> tuple[str, bytes]:
    """Kind and body without parsing the body twice: the header has one fixed layout."""
    prefix = b'{"kind":"'
    end = header.find(b'"', len(prefix))
    middle = b'","body":'
    if not header.startswith(prefix) or header[end : end + len(middle)] != middle or not header.endswith(b"}"):
        raise EngineError(f"not a frame of this protocol: {header[:80]!r}")
    return header[len(prefix) : end].decode(), header[end + len(middle) : -1]


def _value_kind(value: m.Value) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return "text"
    if isinstance(value, tuple):
        return "floats"
    return type(value).__name__


def _validate(adapters: dict[str, TypeAdapter[Any]], kind: str, body: bytes) -> Any:
    if kind not in adapters:
        raise EngineError(f"unknown kind of frame {kind!r}")
    try:
        return adapters[kind].validate_json(body)
    except ValidationError as e:
        raise EngineError(f"malformed {kind} frame: {e.errors(include_url=False)[0]['msg']}") from e
