"""Runs that are wrong on purpose, and what must happen to them.

    frozen-engine   after version 1 every sync is acknowledged, none is applied: the canary must stop the run
    zero-scale      adapters arrive with every B zeroed, as if their scale were 0: the canary must stop the run
    bit-flip        one bit of a chunk flips on the wire: the engine must refuse the adapter and keep the old version
    random-reward   the reward is a hash of the sampled tokens: accuracy must stay flat

The faults sit between trainer and engine, where real ones sit; neither side knows of them. What must happen is written
in the recipe (`controls`), so that a control that does not fire is a failed run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidemill.core.digests import digest_bytes
from tidemill.core.engine_api import (
    AdapterConfig,
    Completion,
    EngineClient,
    EngineInfo,
    GenerateRequest,
    SleepReport,
    TokenEvent,
)
from tidemill.core.errors import BusyError, ConfigError
from tidemill.core.manifest import AdapterManifest, TensorEntry
from tidemill.train.config import CONTROLS, ControlSection, RunConfig


class _Between:
    """An engine seen through a client that passes everything on. Subclasses tamper with adapters."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self._engine.generate(request)

    def stream(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Completion]:
        return self._engine.stream(request)

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> tuple[float, ...]:
        return await self._engine.score(ids, temperature=temperature)

    async def open_session(self, session_id: str) -> None:
        await self._engine.open_session(session_id)

    async def close_session(self, session_id: str) -> None:
        await self._engine.close_session(session_id)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def begin_adapter(self, manifest: AdapterManifest, config: AdapterConfig, *, num_chunks: int) -> None:
        await self._engine.begin_adapter(manifest, config, num_chunks=num_chunks)

    async def adapter_chunk(self, index: int, names: Sequence[str], data: bytes) -> None:
        await self._engine.adapter_chunk(index, names, data)

    async def commit_adapter(self, version: int) -> str:
        return await self._engine.commit_adapter(version)

    async def abort_adapter(self) -> None:
        await self._engine.abort_adapter()

    async def sleep(self, tags: Sequence[str] = ("pools", "derived")) -> SleepReport:
        return await self._engine.sleep(tags)

    async def wake(self, tags: Sequence[str] = ("pools", "derived")) -> SleepReport:
        return await self._engine.wake(tags)

    async def close(self) -> None:
        await self._engine.close()


class FrozenEngine(_Between):
    """Lets version 1 (the identity) through, then says yes to every adapter, serves none, and reports the version it
    was told: only what the weights do gives it away."""

    def __init__(self, engine: EngineClient) -> None:
        super().__init__(engine)
        self._told = 0
        self._digest = ""
        self._pending: AdapterManifest | None = None

    async def info(self) -> EngineInfo:
        info = await self._engine.info()
        return replace(info, version=self._told, adapter_digest=self._digest) if self._told > 1 else info

    async def generate(self, request: GenerateRequest) -> Completion:
        return self._relabel(await self._engine.generate(request))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Completion]:
        async for item in self._engine.stream(request):
            if isinstance(item, Completion):
                yield self._relabel(item)
            else:
                yield replace(item, version=max(item.version, self._told))

    async def begin_adapter(self, manifest: AdapterManifest, config: AdapterConfig, *, num_chunks: int) -> None:
        self._pending = manifest
        if manifest.version == 1:
            await super().begin_adapter(manifest, config, num_chunks=num_chunks)

    async def adapter_chunk(self, index: int, names: Sequence[str], data: bytes) -> None:
        if self._pending is not None and self._pending.version == 1:
            await super().adapter_chunk(index, names, data)

    async def commit_adapter(self, version: int) -> str:
        if version == 1:
            return await super().commit_adapter(version)
        if self._pending is None:
            raise BusyError("no adapter sync is open")
        self._told, self._digest, self._pending = version, self._pending.manifest_sha256, None
        return self._digest

    async def abort_adapter(self) -> None:
        self._pending = None
        await super().abort_adapter()

    def _relabel(self, completion: Completion) -> Completion:
        return replace(completion, versions=tuple(max(v, self._told) for v in completion.versions))


class ZeroScale(_Between):
    """Passes adapters on with every B zeroed (which is what a scale of 0 does) and a manifest to match, and answers
    with the digest the trainer expects."""

    def __init__(self, engine: EngineClient) -> None:
        super().__init__(engine)
        self._digest = ""
        self._sizes: dict[str, int] = {}

    async def begin_adapter(self, manifest: AdapterManifest, config: AdapterConfig, *, num_chunks: int) -> None:
        self._digest = manifest.manifest_sha256
        self._sizes = {t.name: t.nbytes for t in manifest.tensors}
        zeroed = AdapterManifest.build(
            version=manifest.version, base_digest=manifest.base_digest, config_digest=manifest.config_digest,
            created_step=manifest.created_step, previous=manifest.previous,
            tensors=[_zeroed(t) if _is_b(t.name) else t for t in manifest.tensors],
        )
        await self._engine.begin_adapter(zeroed, config, num_chunks=num_chunks)

    async def adapter_chunk(self, index: int, names: Sequence[str], data: bytes) -> None:
        out, begin = bytearray(data), 0
        for name in names:
            end = begin + self._sizes[name]
            if _is_b(name):
                out[begin:end] = bytes(end - begin)
            begin = end
        await self._engine.adapter_chunk(index, names, bytes(out))

    async def commit_adapter(self, version: int) -> str:
        await self._engine.commit_adapter(version)
        return self._digest


class BitFlip(_Between):
    """Flips the lowest bit of the middle byte of the first chunk of every transfer from version 2 on."""

    def __init__(self, engine: EngineClient) -> None:
        super().__init__(engine)
        self._version = 0

    async def begin_adapter(self, manifest: AdapterManifest, config: AdapterConfig, *, num_chunks: int) -> None:
        self._version = manifest.version
        await self._engine.begin_adapter(manifest, config, num_chunks=num_chunks)

    async def adapter_chunk(self, index: int, names: Sequence[str], data: bytes) -> None:
        if index == 0 and self._version > 1:
            flipped = bytearray(data)
            flipped[len(flipped) // 2] ^= 1
            data = bytes(flipped)
        await self._engine.adapter_chunk(index, names, data)


def _is_b(name: str) -> bool:
    return name.endswith("lora_B.weight")


def _zeroed(entry: TensorEntry) -> TensorEntry:
    return TensorEntry(entry.name, entry.dtype, entry.shape, entry.nbytes, digest_bytes(bytes(entry.nbytes)))


def plant(name: str, engine: EngineClient) -> EngineClient:
    """The engine with the control's fault in front of it; the engine itself if the fault is not in the sync."""
    wrappers = {"frozen-engine": FrozenEngine, "zero-scale": ZeroScale, "bit-flip": BitFlip}
    return wrappers[name](engine) if name in wrappers else engine


def random_reward(sampled_ids: Sequence[int]) -> float:
    """0 or 1 from the first byte of a hash of the sampled tokens: reproducible, and unrelated to the task."""
    raw = b"".join(int(t).to_bytes(4, "little") for t in sampled_ids)
    return float(int(digest_bytes(raw).removeprefix("sha256:")[:2], 16) % 2)


def control_settings(config: RunConfig, name: str) -> ControlSection:
    """The recipe's expectation of a control. ConfigError if the name is unknown or the recipe does not define it."""
    if name not in CONTROLS:
        raise ConfigError(f"control = {name!r}: expected one of {', '.join(CONTROLS)}", field="control")
    if name not in config.controls:
        defined = ", ".join(config.controls) or "none"
        raise ConfigError(f"control = {name!r}: recipe {config.name} defines {defined}", field="control",
                          remedy="Add it under `controls` with what must happen.")
    return config.controls[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOutcome:
    """How the run with the fault ended. Accuracies are greedy, on the dev split."""

    stopped_by: str
    """`canary`, `sync-refused`, or another reason."""
    steps: int
    accuracy_before: float
    accuracy_after: float
    served_version: int
    """Version the engine really serves at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the control behaved as the recipe says."""

    name: str
    expect: str
    behaved: bool
    why: str
    outcome: ControlOutcome

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(name: str, settings: ControlSection, outcome: ControlOutcome) -> Verdict:
    """Compare what happened with what the recipe expects."""
    rise = outcome.accuracy_after - outcome.accuracy_before
    if settings.expect == "flat":
        behaved = outcome.stopped_by not in ("canary", "sync-refused") and rise <= settings.tolerance
        why = f"dev accuracy changed by {rise:+.3f} in {outcome.steps} steps (allowed {settings.tolerance:+.3f}), "
        why += f"stopped by {outcome.stopped_by}"
    elif settings.expect == "canary-stops":
        behaved = outcome.stopped_by == "canary"
        why = f"stopped by {outcome.stopped_by} at step {outcome.steps} of at most {settings.steps}"
    else:
        behaved = outcome.stopped_by == "sync-refused" and outcome.served_version == 1
        why = f"stopped by {outcome.stopped_by} at step {outcome.steps}, version {outcome.served_version} stays served"
    return Verdict(name=name, expect=settings.expect, behaved=behaved, why=why, outcome=outcome)
