"""The base store: one folder of frozen weights, in Hugging Face layout, that engine and trainer both compute on.

config.json, model.safetensors (experts packed as MXFP4, one tensor per expert), base-manifest.json (digest of every
tensor, one digest for all). Written whole or not at all; opened read-only by mmap; every mismatch is named.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tidemill.core.digests import digest_json
from tidemill.core.errors import IntegrityError, ManifestError
from tidemill.core.files import write_json
from tidemill.core.manifest import TensorEntry
from tidemill.kernels import mxfp4
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import ModelConfig, TextConfig
from tidemill.model.inventory import inventory
from tidemill.model.names import FileTensor, file_tensors, split_stacked
from tidemill.model.tensor_bytes import TensorFile, stream_tensors, tensor_digest

WEIGHTS = "model.safetensors"
MANIFEST = "base-manifest.json"
_SCHEMA = "base-manifest/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseManifest:
    """What a base is. `base_digest` covers configuration and tensors, not file layout."""

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
            raise ManifestError(f"cannot read {path}: {e.strerror}") from e
        except (ValueError, KeyError, TypeError) as e:
            raise ManifestError(f"{path} is malformed: {e!r}") from e
        if schema != _SCHEMA:
            raise ManifestError(f"{path} has schema {schema!r}, expected {_SCHEMA!r}")
        if manifest.base_digest != _base_digest(manifest.config_digest, manifest.tensors):
            raise ManifestError(f"{path}: its content does not match base_digest")
        return manifest


def _base_digest(config_digest: str, tensors: tuple[TensorEntry, ...]) -> str:
    return digest_json([_SCHEMA, config_digest, [dataclasses.asdict(t) for t in tensors]])


def write_base(folder: Path, model: CausalLM) -> BaseManifest:
    """Store a model: experts are encoded to MXFP4 (unless its configuration says otherwise), everything else as it is.

    Creates `folder` if needed. Files are replaced one by one, the manifest last, so a cut-off write is detected by
    `BaseStore.open`; on an error (disk full) no part of the failed file remains. Adapters attached to the model are
    ignored.
    """
    return write_base_tensors(folder, model.config, _file_tensors_of(model))


def write_base_tensors(folder: Path, config: ModelConfig, tensors: Iterable[Tensor]) -> BaseManifest:
    """`write_base` from tensors that come one by one, in the order of `storage_order`; one is held at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    config.write(folder)
    listed = [(t.name, t.dtype, t.shape) for t in storage_order(config.text_config)]
    manifest = BaseManifest.build(config, stream_tensors(folder / WEIGHTS, listed, tensors))
    write_json(folder / MANIFEST, manifest.to_json())
    return manifest


def storage_order(config: TextConfig) -> list[FileTensor]:
    """File tensors as they lie in the file: the parts of one expert stack side by side, so that they map back as one
    view."""
    order: list[FileTensor] = []
    for spec in inventory(config).values():
        parts = list(split_stacked(spec, quantized=config.quantize_experts))
        order += sorted(parts, key=lambda t: t.part)
    return order


def _file_tensors_of(model: CausalLM) -> Iterator[Tensor]:
    """The tensors of `storage_order`."""
    config = model.config.text_config
    state = model.state_dict()
    for spec in inventory(config).values():
        x = state[spec.name].detach()
        if not spec.is_expert:
            yield x
        elif config.quantize_experts:
            for stack in mxfp4.encode(x):
                yield from stack
        else:
            yield from x


class BaseStore:
    """An opened base. All tensors are views of the mapped file and must not be written to."""

    def __init__(self, folder: Path, config: ModelConfig, manifest: BaseManifest, file: TensorFile) -> None:
        self.folder, self.config, self.manifest = folder, config, manifest
        self._file = file
        self._entries = {t.name: t for t in manifest.tensors}
        self._parts: dict[str, list[FileTensor]] = {}
        for part in file_tensors(config.text_config).values():
            self._parts.setdefault(part.stacked, []).append(part)

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> BaseStore:
        """Open a folder; with `verify` hash every tensor. ConfigError, ManifestError or IntegrityError naming file
        and tensor if a file is missing, cut short or corrupt, or a tensor is missing, unexpected, mis-shaped or
        changed."""
        config = ModelConfig.read(folder)
        manifest = BaseManifest.read(folder / MANIFEST)
        if manifest.config_digest != config.digest:
            raise ManifestError(f"{folder / 'config.json'} is not the configuration that {MANIFEST} was made for")
        file = TensorFile(folder / WEIGHTS)
        expected = file_tensors(config.text_config)
        _check_names(folder / WEIGHTS, file.names(), expected)
        _check_names(folder / MANIFEST, [t.name for t in manifest.tensors], expected)
        entries = {t.name: t for t in manifest.tensors}
        for name, want in expected.items():
            found = file.describe(name)
            if found != (want.dtype, want.shape):
                raise ManifestError(f"{folder / WEIGHTS}: {name} is {found[0]} {list(found[1])}, expected {want.dtype} "
                                    f"{list(want.shape)}")
            if (entries[name].dtype, entries[name].shape) != found:
                raise ManifestError(f"{folder / MANIFEST}: {name} is listed with another dtype or shape than it has")
        store = cls(folder, config, manifest, file)
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
            if tensor_digest(self._file.tensor(name)) != self._entries[name].sha256:
                raise IntegrityError(f"{self.folder / WEIGHTS}: the bytes of {name} are not what {MANIFEST} says")
            count += 1
        return count

    def names(self) -> list[str]:
        """Stacked names (tidemill.model.inventory), in model order."""
        return list(self._parts)

    def file_names(self) -> list[str]:
        """Names in the file, as the manifest lists them."""
        return list(self._entries)

    def tensor(self, name: str) -> Tensor:
        """One tensor by stacked name, as stored, a view of the file. ManifestError for packed experts: see `packed`."""
        parts = self._require(name)
        if parts[0].expert is None:
            return self._file.tensor(name)
        if parts[0].part == "weight":
            return self._file.stack([p.name for p in parts])
        raise ManifestError(f"{name} is stored packed: ask for packed() or decoded()")

    def packed(self, name: str) -> tuple[Tensor, Tensor]:
        """(packed u8 [E, out, in/2], scale u8 [E, out, in/32]) of a stack of experts; views of the file."""
        parts = self._require(name)
        if parts[0].part == "weight":
            raise ManifestError(f"{name} is not stored packed: ask for tensor()")
        packed = self._file.stack([p.name for p in parts if p.part == "packed"])
        return packed, self._file.stack([p.name for p in parts if p.part == "scale"])

    def decoded(self, name: str) -> Tensor:
        """One tensor by stacked name in the dtype to compute with: packed experts decoded (a new tensor), others as
        stored."""
        if self._require(name)[0].part == "packed":
            return mxfp4.decode(*self.packed(name), dtype=self.config.text_config.torch_dtype)
        return self.tensor(name)

    def state_dict(self) -> dict[str, Tensor]:
        """`decoded` of every name: what the engine and the trainer both compute on."""
        return {name: self.decoded(name) for name in self.names()}

    def model(self) -> CausalLM:
        """A trainable-form model holding copies of exactly these values, all frozen (attach an adapter to train)."""
        model = CausalLM(self.config, initialise=False)
        model.load_state_dict(self.state_dict(), strict=True)
        return model.requires_grad_(False)

    def _require(self, name: str) -> list[FileTensor]:
        try:
            return self._parts[name]
        except KeyError:
            raise ManifestError(f"this model has no tensor {name}") from None


def _check_names(path: Path, found: list[str], expected: Mapping[str, FileTensor]) -> None:
    missing = [name for name in expected if name not in set(found)]
    if missing:
        raise ManifestError(f"{path}: {missing[0]} is missing ({len(missing)} tensors in all)")
    unexpected = [name for name in found if name not in expected]
    if unexpected:
        raise ManifestError(f"{path}: {unexpected[0]} is unexpected ({len(unexpected)} tensors in all)")
    if len(found) != len(expected):
        raise ManifestError(f"{path}: {len(found)} names for {len(expected)} tensors: a name is listed twice")
