"""The adapter served and the shadow slot a new one is received into.

A sync is begin, chunks, commit. Every tensor is hashed as it arrives and copied once, straight to where the runner will
read it, so that besides the two slots only the chunk in hand takes memory. Whatever is wrong drops the shadow slot and
raises; the old version stays served. The swap at commit is one assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.core.digests import digest_bytes
from tidemill.core.engine_api import AdapterConfig
from tidemill.core.errors import BusyError, CapacityError, ConfigError, IntegrityError, ManifestError, StaleVersionError
from tidemill.core.manifest import AdapterManifest, TensorEntry
from tidemill.kernels.linear import padded_rows
from tidemill.kernels.moe import ExpertLora
from tidemill.model.adapter_view import Factors, LayerAdapter
from tidemill.model.config import TextConfig
from tidemill.model.lora import LoraConfig, Site, adapter_shapes, require_same_targets, sites


@dataclass(frozen=True, slots=True)
class LiveAdapter:
    """What the runner adds to the base."""

    layers: tuple[LayerAdapter, ...]
    lora: LoraConfig


class Slot:
    """Room for one adapter in the layout the kernels want: ranks zero-padded to a multiple of 16, the model's dtype."""

    def __init__(self, text: TextConfig, lora: LoraConfig) -> None:
        self._dtype = text.torch_dtype
        self._rank = padded_rows(lora.rank)
        self._places: dict[str, Tensor] = {}
        """Where each exported tensor goes; a shared factor is one place under several names."""
        self._whole: dict[str, Tensor] = {}
        """A factors with their padding, by exported name."""
        self._filled: set[int] = set()
        modules: list[dict[str, Factors]] = [{} for _ in range(text.num_hidden_layers)]
        stacks: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in range(text.num_hidden_layers)]
        for site in sites(text, lora):
            _, _, index, local = site.module.split(".", 3)
            a, b = self._factors(site, lora.rank)
            if site.group == "experts":
                stacks[int(index)][site.module.rpartition(".")[2]] = a, b
            else:
                modules[int(index)][local] = Factors(a, b, lora.scale)
        self.layers = tuple(LayerAdapter(m, _experts(s, lora.scale)) for m, s in zip(modules, stacks, strict=True))

    def put(self, name: str, value: Tensor) -> None:
        """Copy one exported tensor to its place. Raises ManifestError if a shared factor arrives twice and differs."""
        place = self._places[name]
        if id(place) not in self._filled:
            place.copy_(value)
            self._filled.add(id(place))
        elif not torch.equal(place, value.to(place.dtype).view(place.shape)):
            raise ManifestError(f"{name} differs from the copy under another name: it is one shared factor")

    def _factors(self, site: Site, rank: int) -> tuple[Tensor, Tensor]:
        b = torch.zeros((*site.b_shape[:-1], self._rank), dtype=self._dtype)
        self._places[site.b_name] = b[..., :rank]
        if site.shares_a_with:
            other = f"{site.shares_a_with}.lora_A.weight"
            a, self._places[site.a_name] = self._whole[other], self._places[other]
        else:
            a = torch.zeros((*site.a_shape[:-2], self._rank, site.a_shape[-1]), dtype=self._dtype)
            self._places[site.a_name] = a[..., :rank, :]
        self._whole[site.a_name] = a
        return a, b


def _experts(parts: dict[str, tuple[Tensor, Tensor]], scale: float) -> ExpertLora | None:
    if not parts:
        return None
    (a13, b1), (_, b3), (a2, b2) = parts["w1"], parts["w3"], parts["w2"]
    return ExpertLora(a13.squeeze(0), b1, b3, a2, b2.squeeze(0), scale)


@dataclass(slots=True)
class _Sync:
    """A sync in progress."""

    manifest: AdapterManifest
    lora: LoraConfig
    num_chunks: int
    slot: Slot
    wanted: dict[str, TensorEntry]
    received: list[TensorEntry]
    next_chunk: int = 0


class AdapterStore:
    """The live adapter (version 0: none) and at most one sync in progress."""

    def __init__(self, text: TextConfig, base_digest: str, *, max_rank: int) -> None:
        self._text, self._base_digest, self._max_rank = text, base_digest, max_rank
        self.live: LiveAdapter | None = None
        self.version = 0
        self.digest = ""
        self._sync: _Sync | None = None

    def begin(self, manifest: AdapterManifest, config: AdapterConfig, num_chunks: int) -> None:
        """Open the shadow slot for version `manifest.version`.

        Raises BusyError (a sync is open), StaleVersionError, IntegrityError (another base, targets unknown or other
        than those served, another configuration than the manifest's), CapacityError (rank), ManifestError (empty, no
        chunks, tensors that do not fit the targets).
        """
        if self._sync is not None:
            raise BusyError(f"a sync of version {self._sync.manifest.version} is open", remedy="Commit or abort it.")
        manifest.verify()
        if manifest.version <= self.version:
            raise StaleVersionError(f"adapter version {manifest.version} is not newer than version {self.version} "
                                    "served")
        if manifest.base_digest != self._base_digest:
            raise IntegrityError(f"the adapter was made for base {manifest.base_digest}, this engine serves "
                                 f"{self._base_digest}")
        if num_chunks < 1:
            raise ManifestError(f"num_chunks = {num_chunks}: a sync without chunks is never valid")
        lora = self._check_config(manifest, config)
        self._check_tensors(manifest, lora)
        wanted = {t.name: t for t in manifest.tensors}
        self._sync = _Sync(manifest, lora, num_chunks, Slot(self._text, lora), wanted, [])

    def chunk(self, index: int, names: Sequence[str], data: bytes) -> None:
        """Take chunk `index`: the tensors `names` one after another without gaps.

        Raises BusyError if no sync is open; IntegrityError or ManifestError (wrong order, unknown or repeated tensor,
        wrong length, bytes that do not match the manifest, NaN or infinity), and the sync is dropped.
        """
        sync = self._require_sync()
        try:
            self._take(sync, index, names, data)
        except IntegrityError:
            self._sync = None
            raise

    def commit(self, version: int) -> str:
        """Serve the received adapter; returns the digest of the manifest made from what was received.

        Raises BusyError if no sync is open; ManifestError if chunks or tensors are missing or the version is another,
        and the sync is dropped.
        """
        sync, self._sync = self._require_sync(), None
        if version != sync.manifest.version:
            raise ManifestError(f"commit of version {version}, but version {sync.manifest.version} was begun")
        missing = [name for name in sync.wanted if name not in {t.name for t in sync.received}]
        if missing:
            raise ManifestError(f"adapter v{version}: {missing[0]} has not arrived ({len(missing)} tensors missing)")
        if sync.next_chunk != sync.num_chunks:
            raise ManifestError(f"adapter v{version}: {sync.next_chunk} of {sync.num_chunks} chunks arrived")
        m = sync.manifest
        own = AdapterManifest.build(
            version=m.version, base_digest=self._base_digest, config_digest=sync.lora.digest,
            created_step=m.created_step, previous=m.previous, tensors=sync.received,
        )
        self.live, self.version, self.digest = LiveAdapter(sync.slot.layers, sync.lora), version, own.manifest_sha256
        return own.manifest_sha256

    def abort(self) -> None:
        """Drop the shadow slot; idempotent."""
        self._sync = None

    def _require_sync(self) -> _Sync:
        if self._sync is None:
            raise BusyError("no adapter sync is open", remedy="Begin one first.")
        return self._sync

    def _check_config(self, manifest: AdapterManifest, config: AdapterConfig) -> LoraConfig:
        try:
            lora = LoraConfig.from_adapter_config(config)
            if self.live is not None:
                require_same_targets(lora, self.live.lora)
        except ConfigError as e:
            raise IntegrityError(f"adapter v{manifest.version}: {e}") from e
        if lora.rank > self._max_rank:
            raise CapacityError(f"adapter rank {lora.rank} is above max_lora_rank = {self._max_rank}", field="rank",
                                remedy="Start the engine with a larger max_lora_rank.")
        if manifest.config_digest != lora.digest:
            raise IntegrityError(f"adapter v{manifest.version}: config_digest {manifest.config_digest} is not that of "
                                 f"the configuration given ({lora.digest})")
        return lora

    def _check_tensors(self, manifest: AdapterManifest, lora: LoraConfig) -> None:
        shapes = adapter_shapes(self._text, lora)
        listed = {t.name: t for t in manifest.tensors}
        missing = [n for n in shapes if n not in listed]
        unexpected = [n for n in listed if n not in shapes]
        if missing or unexpected:
            raise ManifestError(
                f"adapter v{manifest.version} does not fit targets {', '.join(lora.targets)}: "
                + (f"{missing[0]} is missing" if missing else f"{unexpected[0]} is unexpected")
                + f" ({len(missing)} missing, {len(unexpected)} unexpected)")
        itemsize = 2 if lora.dtype == "bfloat16" else 4
        for name, shape in shapes.items():
            entry = listed[name]
            if (entry.dtype, entry.shape) != (lora.dtype, shape):
                raise ManifestError(f"adapter v{manifest.version}: {name} is {entry.dtype} {list(entry.shape)}, "
                                    f"expected {lora.dtype} {list(shape)}")
            if entry.nbytes != torch.Size(shape).numel() * itemsize:
                raise ManifestError(f"adapter v{manifest.version}: {name} is listed with {entry.nbytes} bytes")

    def _take(self, sync: _Sync, index: int, names: Sequence[str], data: bytes) -> None:
        version = sync.manifest.version
        if index != sync.next_chunk or index >= sync.num_chunks:
            raise ManifestError(f"adapter v{version}: chunk {index} came, expected {sync.next_chunk} of "
                                f"{sync.num_chunks}")
        seen = {t.name for t in sync.received}
        for name in names:
            if name not in sync.wanted:
                raise ManifestError(f"adapter v{version}: chunk {index} names {name}, which the manifest does not list")
            if name in seen:
                raise ManifestError(f"adapter v{version}: {name} came twice")
            seen.add(name)
        expected = sum(sync.wanted[n].nbytes for n in names)
        if len(data) != expected or not names:
            raise IntegrityError(f"adapter v{version}: chunk {index} has {len(data)} bytes for {len(names)} tensors of "
                                 f"{expected} bytes")
        view, begin = memoryview(data), 0
        for name in names:
            entry = sync.wanted[name]
            part = bytearray(view[begin : begin + entry.nbytes])  # torch wants a writable buffer: one tensor's copy
            begin += entry.nbytes
            digest = digest_bytes(part)
            if digest != entry.sha256:
                raise IntegrityError(f"adapter v{version}: the bytes of {name} are not what the manifest says")
            value = torch.frombuffer(part, dtype=getattr(torch, entry.dtype)).view(entry.shape)
            if not bool(torch.isfinite(value).all()):
                raise IntegrityError(f"adapter v{version}: {name} holds NaN or infinity")
            sync.slot.put(name, value)
            sync.received.append(TensorEntry(name, entry.dtype, entry.shape, entry.nbytes, digest))
        sync.next_chunk += 1
