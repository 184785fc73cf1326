"""The base store: one folder of frozen weights, in Hugging Face layout, that engine and trainer both compute on.

config.json, model.safetensors or shards with an index (experts packed as MXFP4, usually one tensor per expert),
base-manifest.json (digest of every tensor, one digest for all). Written whole or not at all; opened read-only by mmap;
every mismatch is named.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tidemill.core.digests import digest_json
from tidemill.core.errors import IntegrityError, ManifestError
from tidemill.core.files import write_json
from tidemill.core.manifest import TensorEntry
from tidemill.kernels import mxfp4
from tidemill.model.causal_lm import CausalLM
from tidemill.model.checkpoint import Checkpoint
from tidemill.model.config import ModelConfig
from tidemill.model.inventory import inventory
from tidemill.model.names import ExpertForm, FileTensor, in_storage_order
from tidemill.model.shards import INDEX, MAX_SHARD_BYTES, WEIGHTS, plan_shards, write_index
from tidemill.model.tensor_bytes import stream_tensors, tensor_digest

__all__ = ["MANIFEST", "WEIGHTS", "BaseManifest", "BaseStore", "write_base", "write_base_tensors", "write_manifest"]

MANIFEST = "base-manifest.json"
_CONVERT = "Make a base of it with `tidemill model convert SRC DST`."
_SCHEMA = "base-manifest/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseManifest:
    """What a base is. `base_digest` covers configuration and tensors, not how they are spread over files. Tensors are
    named as in the files, without `language_model.`."""

    config_digest: str
    tensors: tuple[TensorEntry, ...]
    base_digest: str

    @classmethod
    def build(cls, config: ModelConfig, entries: Iterable[TensorEntry]) -> BaseManifest:
        tensors = tuple(sorted(entries, key=lambda t: t.name))
        return cls(config_digest=config.digest, tensors=tensors, base_digest=_base_digest(config.digest, tensors))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": _SCHEMA, "config_digest": self.config_digest, "base_digest": self.base_digest,
            "count": len(self.tensors), "total_bytes": sum(t.nbytes for t in self.tensors),
            "tensors": [dataclasses.asdict(t) for t in self.tensors],
        }

    @classmethod
    def read(cls, path: Path) -> BaseManifest:
        """Parse and check. ManifestError naming the file if it is missing, malformed or contradicts itself."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            entries = tuple(TensorEntry(**(t | {"shape": tuple(t["shape"])})) for t in data["tensors"])
            manifest = cls(config_digest=data["config_digest"], tensors=entries, base_digest=data["base_digest"])
            schema = data["schema"]
        except OSError as e:
            raise ManifestError(f"cannot read {path}: {e.strerror}", remedy=_CONVERT) from e
        except (ValueError, KeyError, TypeError) as e:
            raise ManifestError(f"{path} is malformed: {e!r}") from e
        if schema != _SCHEMA:
            raise ManifestError(f"{path} has schema {schema!r}, expected {_SCHEMA!r}")
        if manifest.base_digest != _base_digest(manifest.config_digest, manifest.tensors):
            raise ManifestError(f"{path}: its content does not match base_digest")
        return manifest


def _base_digest(config_digest: str, tensors: tuple[TensorEntry, ...]) -> str:
    return digest_json([_SCHEMA, config_digest, [dataclasses.asdict(t) for t in tensors]])


def write_base(folder: Path, model: CausalLM, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> BaseManifest:
    """Store a model: experts are encoded to MXFP4 (unless its configuration says otherwise), everything else as it is.

    Creates `folder` if needed. Files are replaced one by one, the manifest last, so a cut-off write is detected by
    `BaseStore.open`; on an error (disk full) no part of the failed file remains. Beside the model one packed expert
    and the scales of its stack are held. Adapters attached to the model are ignored.
    """
    return write_base_tensors(folder, model.config, _file_tensors_of(model), max_shard_bytes=max_shard_bytes)


def write_base_tensors(folder: Path, config: ModelConfig, tensors: Iterable[Tensor], *,
                       max_shard_bytes: int = MAX_SHARD_BYTES) -> BaseManifest:
    """`write_base` from tensors that come one by one, in the order of tidemill.model.names.storage_order; one is held
    at a time. AssertionError if there are more or fewer than the model has."""
    text = config.text_config
    form = ExpertForm("per-expert", text.quantize_experts)
    groups = [[t.plan for t in in_storage_order(spec, form)] for spec in inventory(text).values()]
    shards = plan_shards(groups, max_shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, INDEX):
        (folder / name).unlink(missing_ok=True)
    config.write(folder)
    source = iter(tensors)
    entries: list[TensorEntry] = []
    for shard in shards:
        entries += stream_tensors(folder / shard.name, shard.tensors, lambda _: itertools.islice(source, 1)).entries
    assert next(source, None) is None, "more tensors than the model has"
    write_index(folder, shards)
    return write_manifest(folder, config, entries)


def write_manifest(folder: Path, config: ModelConfig, entries: Iterable[TensorEntry]) -> BaseManifest:
    """The last file of a base; with it the folder is one."""
    manifest = BaseManifest.build(config, entries)
    write_json(folder / MANIFEST, manifest.to_json())
    return manifest


def _file_tensors_of(model: CausalLM) -> Iterator[Tensor]:
    """The tensors of a model in storage order."""
    quantized, state = model.config.text_config.quantize_experts, model.state_dict()
    for spec in inventory(model.config.text_config).values():
        x = state[spec.name].detach()
        if not spec.is_expert:
            yield x
        elif quantized:
            scales: list[Tensor] = []
            for expert in x:
                packed, scale = mxfp4.encode(expert)
                scales.append(scale)
                yield packed
            yield from scales
        else:
            yield from x


class BaseStore:
    """An opened base. All tensors are views of the mapped files and must not be written to."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, manifest: BaseManifest) -> None:
        self.folder, self.config, self.manifest = checkpoint.folder, config, manifest
        self._checkpoint = checkpoint
        self._entries = {t.name: t for t in manifest.tensors}
        self._parts = {name: checkpoint.parts(name) for name in checkpoint.specs}

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> BaseStore:
        """Open a folder; with `verify` hash every tensor. ConfigError, ManifestError or IntegrityError naming file
        and tensor if a file is missing, cut short or corrupt, or a tensor is missing, unexpected, mis-shaped or
        changed. A folder without our manifest is refused with the command that makes a base of it."""
        config = ModelConfig.read(folder)
        manifest = BaseManifest.read(folder / MANIFEST)
        if manifest.config_digest != config.digest:
            raise ManifestError(f"{folder / 'config.json'} is not the configuration that {MANIFEST} was made for")
        checkpoint = Checkpoint.open(folder)
        if checkpoint.config != config:
            raise ManifestError(f"{folder / 'config.json'} and the weights disagree on whether experts are packed",
                                remedy=_CONVERT)
        odd = checkpoint.not_as_expected()
        if odd:
            raise ManifestError(f"{odd[0]} ({len(odd)} in all)", remedy=_CONVERT)
        store = cls(checkpoint, config, manifest)
        store._check_manifest()
        if verify:
            store.verify()
        return store

    @property
    def digest(self) -> str:
        return self.manifest.base_digest

    def verify(self, names: Iterable[str] | None = None) -> int:
        """Hash these file tensors (None: all) against the manifest; returns how many. IntegrityError names the first
        that differs."""
        count = 0
        for name in self._entries if names is None else names:
            if name not in self._entries:
                raise ManifestError(f"{self.folder / MANIFEST} lists no tensor {name}")
            file, _ = self._checkpoint.file(name)
            if tensor_digest(self._view(name)) != self._entries[name].sha256:
                raise IntegrityError(f"{file.path}: the bytes of {name} are not what {MANIFEST} says")
            count += 1
        return count

    def names(self) -> list[str]:
        """Stacked names (tidemill.model.inventory), in model order."""
        return list(self._parts)

    def file_names(self) -> list[str]:
        """Names of file tensors (without `language_model.`) as the manifest lists them, a vision tower's among them."""
        return list(self._entries)

    def tensor(self, name: str) -> Tensor:
        """One tensor by stacked name, as stored, a view of the file. ManifestError for packed experts: see `packed`."""
        parts = self._require(name)
        if parts[0].part != "weight":
            raise ManifestError(f"{name} is stored packed: ask for packed() or decoded()")
        return self._joined(parts)

    def packed(self, name: str) -> tuple[Tensor, Tensor]:
        """(packed u8 [E, out, in/2], scale u8 [E, out, in/32]) of a stack of experts; views of the file."""
        parts = self._require(name)
        if parts[0].part == "weight":
            raise ManifestError(f"{name} is not stored packed: ask for tensor()")
        return (self._joined([p for p in parts if p.part == "packed"]),
                self._joined([p for p in parts if p.part == "scale"]))

    def decoded(self, name: str) -> Tensor:
        """One tensor by stacked name in the dtype to compute with: packed experts decoded (a new tensor), others as
        stored."""
        if self._require(name)[0].part == "weight":
            return self.tensor(name)
        return mxfp4.decode(*self.packed(name), dtype=self.config.text_config.torch_dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """`decoded` of every name: what the engine and the trainer both compute on."""
        return {name: self.decoded(name) for name in self.names()}

    def model(self) -> CausalLM:
        """A trainable-form model holding copies of exactly these values, all frozen (attach an adapter to train)."""
        return self._checkpoint.model().requires_grad_(False)

    def _check_manifest(self) -> None:
        expected = {p.name: (p.dtype, p.shape) for parts in self._parts.values() for p in parts}
        expected |= {name: (t.dtype, t.shape) for name, t in self._checkpoint.vision.items()}
        path = self.folder / MANIFEST
        for name in (*expected, *self._entries):
            if name not in self._entries or name not in expected:
                raise ManifestError(f"{path}: {name} is {'missing' if name in expected else 'unexpected'}")
            entry = self._entries[name]
            if (entry.dtype, entry.shape) != expected[name]:
                raise ManifestError(f"{path}: {name} is listed with another dtype or shape than it has")
        if len(self.manifest.tensors) != len(expected):
            raise ManifestError(f"{path} lists {len(self.manifest.tensors)} tensors for {len(expected)} names: one is "
                                "listed twice")

    def _view(self, part: str) -> Tensor:
        file, name = self._checkpoint.file(part)
        return file.tensor(name)

    def _joined(self, parts: list[FileTensor]) -> Tensor:
        """The whole tensor of these parts: one view if they lie side by side in one file, a copy otherwise."""
        if parts[0].expert is None:
            return self._view(parts[0].name)
        places = [self._checkpoint.file(p.name) for p in parts]
        if any(file is not places[0][0] for file, _ in places):
            return torch.stack([file.tensor(name) for file, name in places])
        return places[0][0].stack([name for _, name in places])

    def _require(self, name: str) -> list[FileTensor]:
        try:
            return self._parts[name]
        except KeyError:
            raise ManifestError(f"this model has no tensor {name}") from None
