"""What goes into an engine's inbox and what comes out. Plain dataclasses: the same for a thread and for a socket.

Every message carries the `call_id` its answers refer to. A call ends with exactly one final Reply (`Result` or
`Failure`); a streamed generation has Token replies before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.core.engine_api import (
    AdapterConfig,
    Completion,
    EngineInfo,
    GenerateRequest,
    SleepReport,
    TokenEvent,
)
from tidemill.core.errors import TidemillError


@dataclass(frozen=True, slots=True)
class Generate:
    call_id: int
    request: GenerateRequest
    stream: bool


@dataclass(frozen=True, slots=True)
class Score:
    call_id: int
    ids: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a request by its id; the reply is None whether or not it ran."""

    call_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for call `target` any more: stop it. There is no reply."""

    call_id: int
    target: int


@dataclass(frozen=True, slots=True)
class OpenSession:
    call_id: int
    session_id: str


@dataclass(frozen=True, slots=True)
class CloseSession:
    call_id: int
    session_id: str


@dataclass(frozen=True, slots=True)
class BeginAdapter:
    """`manifest` is AdapterManifest.to_json()."""

    call_id: int
    manifest: dict[str, object]
    config: AdapterConfig
    num_chunks: int


@dataclass(frozen=True, slots=True)
class AdapterChunk:
    """`data` travels beside the header on a wire, never inside JSON."""

    call_id: int
    index: int
    names: tuple[str, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class CommitAdapter:
    call_id: int
    version: int


@dataclass(frozen=True, slots=True)
class AbortAdapter:
    call_id: int


@dataclass(frozen=True, slots=True)
class Sleep:
    call_id: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wake:
    call_id: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Info:
    call_id: int


Message = (
    Generate | Score | Abort | Cancel | OpenSession | CloseSession | BeginAdapter | AdapterChunk | CommitAdapter
    | AbortAdapter | Sleep | Wake | Info
)


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token of a streamed generation."""

    call_id: int
    event: TokenEvent


Value = Completion | EngineInfo | SleepReport | tuple[float, ...] | str | None


@dataclass(frozen=True, slots=True)
class Result:
    """The call ended well."""

    call_id: int
    value: Value


@dataclass(frozen=True, slots=True)
class Failure:
    """The call was refused or failed; the caller sees `error` raised."""

    call_id: int
    error: TidemillError


Reply = Token | Result | Failure
