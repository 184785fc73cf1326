"""Adapter sync with proof: export, manifest, chunks, commit, and what the engine says it now serves.

The engine's own manifest digest must equal ours; the first adapter must be the identity (every B exactly 0); after a
normal step at least one tensor must have changed. A refused transfer is repeated once in full, then the run stops; the
old version stays served throughout. Besides the trainer's own tensors, one chunk at a time is held.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tidemill.core.engine_api import EngineClient
from tidemill.core.errors import IntegrityError, TrainError
from tidemill.core.manifest import AdapterManifest
from tidemill.model.lora import LoraConfig, build_manifest
from tidemill.model.peft_files import read_manifest, write_adapter
from tidemill.model.tensor_bytes import tensor_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One verified sync."""

    version: int
    manifest_sha256: str
    tensors: int
    changed: int
    """Tensors whose bytes differ from the previous version (all of them at the first)."""
    nbytes: int
    chunks: int
    largest_chunk: int
    attempts: int
    seconds: float


def plan_chunks(tensors: Mapping[str, Tensor], *, max_bytes: int) -> list[list[str]]:
    """Names in order, cut so that a chunk holds at most max_bytes (a larger tensor is a chunk of its own)."""
    chunks: list[list[str]] = []
    room = 0
    for name, x in tensors.items():
        size = x.numel() * x.element_size()
        if not chunks or size > room:
            chunks.append([])
            room = max_bytes
        chunks[-1].append(name)
        room -= size
    return chunks


class SyncRefusedError(TrainError):
    """The engine refused an adapter twice; it still serves the version before."""


class AdapterSync:
    """Pushes adapter versions 1, 2, ... of one base to one engine and keeps them under `folder`/vNNNN."""

    def __init__(self, engine: EngineClient, lora: LoraConfig, *, base_digest: str, folder: Path,
                 chunk_bytes: int) -> None:
        self._engine, self._lora, self._base_digest = engine, lora, base_digest
        self._folder, self._chunk_bytes = folder, chunk_bytes
        self.manifest: AdapterManifest | None = None
        """Manifest of the version last acknowledged by the engine."""

    @property
    def version(self) -> int:
        """Version last acknowledged; 0 before the first sync."""
        return self.manifest.version if self.manifest else 0

    async def push(self, tensors: Mapping[str, Tensor], *, step: int, must_change: bool) -> SyncReport:
        """Make these tensors version v + 1 and see the engine serve it.

        must_change: a normal optimizer step lies behind, so an unchanged export is an error (TrainError). Raises
        TrainError if the engine refuses twice or answers with another digest.
        """
        manifest = build_manifest(tensors, version=self.version + 1, base_digest=self._base_digest,
                                  config_digest=self._lora.digest, created_step=step,
                                  previous=self.manifest.manifest_sha256 if self.manifest else "")
        changed = self._count_changed(manifest)
        if self.manifest is None:
            live = [n for n, x in tensors.items() if n.endswith("lora_B.weight") and bool((x != 0).any())]
            if live:
                raise TrainError(f"first adapter: {live[0]} is not zero, so version 1 would not be the base's function")
        elif must_change and not changed:
            raise TrainError(f"adapter v{manifest.version}: no tensor changed although step {step} was a normal one")
        write_adapter(self._version_folder(manifest.version), self._lora, tensors, manifest)
        return await self._transfer(tensors, manifest, changed)

    def resume_from(self, version: int) -> None:
        """Go on after `version`, which an earlier attempt wrote: the next push is version + 1 and chains to it. Raises
        ManifestError if its manifest is damaged."""
        self.manifest = read_manifest(self._version_folder(version))

    async def _transfer(self, tensors: Mapping[str, Tensor], manifest: AdapterManifest, changed: int) -> SyncReport:
        started = time.monotonic()
        plan = plan_chunks(tensors, max_bytes=self._chunk_bytes)
        attempts = 1
        try:
            digest, largest = await self._send(tensors, manifest, plan)
        except IntegrityError:
            attempts = 2
            try:
                digest, largest = await self._send(tensors, manifest, plan)
            except IntegrityError as e:
                raise SyncRefusedError(
                    f"adapter v{manifest.version} was refused twice, version {self.version} stays served: {e}",
                    remedy="Compare the adapter's folder with its manifest, then resume the run.",
                ) from e
        if digest != manifest.manifest_sha256:
            raise TrainError(f"adapter v{manifest.version}: the engine serves {digest}, exported was "
                             f"{manifest.manifest_sha256}")
        self.manifest = manifest
        return SyncReport(
            version=manifest.version, manifest_sha256=digest, tensors=manifest.count, changed=changed,
            nbytes=manifest.total_bytes, chunks=len(plan), largest_chunk=largest, attempts=attempts,
            seconds=time.monotonic() - started,
        )

    async def _send(self, tensors: Mapping[str, Tensor], manifest: AdapterManifest,
                    plan: list[list[str]]) -> tuple[str, int]:
        """One attempt; no shadow slot stays open. Returns the engine's digest and the largest chunk."""
        largest = 0
        try:
            await self._engine.begin_adapter(manifest, self._lora.to_adapter_config(), num_chunks=len(plan))
            for index, names in enumerate(plan):
                data = b"".join(tensor_bytes(tensors[name]) for name in names)
                largest = max(largest, len(data))
                await self._engine.adapter_chunk(index, names, data)
            return await self._engine.commit_adapter(manifest.version), largest
        except BaseException:
            await self._engine.abort_adapter()
            raise

    def _count_changed(self, manifest: AdapterManifest) -> int:
        before = {t.name: t.sha256 for t in self.manifest.tensors} if self.manifest else {}
        return sum(before.get(t.name) != t.sha256 for t in manifest.tensors)

    def _version_folder(self, version: int) -> Path:
        return self._folder / f"v{version:04d}"
