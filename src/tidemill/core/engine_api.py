"""What crosses the border of the engine: messages, and the client protocol through which agents and trainers see it.

Messages are plain dataclasses of ints, floats, strings, tuples and bytes, so that an embedded, a spawned and a remote
engine are the same to their callers. No torch here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tidemill.core.manifest import AdapterManifest


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    """A stop token was sampled (it is included in `ids`)."""
    LENGTH = "length"
    """max_tokens or the context limit was reached."""
    ABORT = "abort"
    """The caller aborted it."""
    ERROR = "error"
    """This request failed (for instance a non-finite logit); `error` says how. Neighbours are unaffected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. Random numbers are a pure function of (seed, sequence, absolute position)."""

    max_tokens: int
    """Tokens to sample at most, >= 0 (0: only prefill)."""
    temperature: float = 1.0
    """0 is greedy (lowest id on ties)."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    seed: int = 0
    """64-bit key."""
    sequence: int = 0
    """64-bit counter half: a caller that wants reproducible rollouts derives it from (step, prompt, sample)."""
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """Stop tokens are masked until this many tokens were sampled."""
    top_logprobs: int = 0
    """How many alternatives to report per sampled token (raw model log-probs), 0..20."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Prefill `ids` (after the session's log, if any), then sample.

    session_id  continue this session: its log is the prefix, and given and sampled ids are appended to it
    """

    request_id: str
    ids: tuple[int, ...]
    sampling: SamplingParams
    session_id: str | None = None
    prompt_logprobs: bool = False
    """Also report the raw log-prob of every given token (None for the first of a sequence)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One sampled token. `logprob` is the behaviour log-prob (after temperature and filters), `model_logprob` raw."""

    request_id: str
    token_id: int
    logprob: float
    model_logprob: float
    position: int
    version: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """End of a request. Lists run over sampled tokens, stop token included."""

    request_id: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    model_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_logprobs: tuple[float | None, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """LoRA settings an adapter was made with. `targets` are group names (tidemill.model.lora)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine serves now."""

    model: str
    base_digest: str
    adapter_digest: str
    version: int
    vocab_size: int
    max_model_len: int
    max_running: int
    num_pages: int
    page_size: int
    num_slots: int
    numerics: str
    """Identifies the arithmetic (kernel path and revision); cached state is only valid under the same value."""
    asleep: tuple[str, ...] = ()
    stats: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepReport:
    """What a sleep or wake really did, in bytes of resident memory."""

    tags: tuple[str, ...]
    freed_bytes: int
    expected_bytes: int
    rss_before: int
    rss_after: int


class EngineClient(Protocol):
    """Async view of one engine. Implementations: embedded in a thread, spawned behind a socket, HTTP.

    Every method may be cancelled; cancelling `generate` or `stream` aborts the request in the engine.
    """

    async def info(self) -> EngineInfo: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Run to the end. Raises InputError (bad request), EngineError."""
        ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Completion]:
        """TokenEvents as they are sampled, then one Completion."""
        ...

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> tuple[float, ...]:
        """Log-prob of ids[t] given ids[:t] for t = 1.. (length len(ids) - 1), under the live adapter."""
        ...

    async def open_session(self, session_id: str) -> None:
        """Start an empty session. InputError if it exists."""
        ...

    async def close_session(self, session_id: str) -> None:
        """Drop the session's log, pages and state; idempotent."""
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request; its caller gets FinishReason.ABORT. Idempotent."""
        ...

    async def begin_adapter(self, manifest: AdapterManifest, config: AdapterConfig, *, num_chunks: int) -> None:
        """Open a shadow slot. Raises StaleVersionError, IntegrityError (other base, unknown targets), ManifestError."""
        ...

    async def adapter_chunk(self, index: int, names: Sequence[str], data: bytes) -> None:
        """Copy one flat chunk into the shadow slot and hash each tensor. Raises IntegrityError; the slot is dropped."""
        ...

    async def commit_adapter(self, version: int) -> str:
        """Check completeness, swap atomically, flush caches; return the engine's own manifest digest."""
        ...

    async def abort_adapter(self) -> None:
        """Drop the shadow slot; the old version stays served. Idempotent."""
        ...

    async def sleep(self, tags: Sequence[str] = ("pools", "derived")) -> SleepReport:
        """Free pools and derived buffers; sessions keep their logs and recompute later."""
        ...

    async def wake(self, tags: Sequence[str] = ("pools", "derived")) -> SleepReport:
        """Undo sleep and verify the base digest (sampled tensors)."""
        ...

    async def close(self) -> None:
        """Stop the engine; idempotent."""
        ...
