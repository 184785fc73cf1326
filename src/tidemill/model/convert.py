"""A checkpoint folder as another one - experts packed or plain, one by one or stacked, another dtype, other shard
sizes - and as a base with digests: `tidemill model convert`.

Streams: one tensor (one expert of a stack) is held at a time. conversion.json in the new folder lists the finished
shards with their SHA-256; a conversion that was killed goes on behind them and ends with the same bytes as one that was
not. base-manifest.json is written last, so that an unfinished folder is never taken for a model.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tidemill.core.digests import digest_file, digest_json
from tidemill.core.errors import CapacityError, InputError
from tidemill.core.files import write_atomic, write_json
from tidemill.core.manifest import TensorEntry
from tidemill.kernels import mxfp4
from tidemill.model.base import BaseManifest, write_manifest
from tidemill.model.checkpoint import Checkpoint
from tidemill.model.config import DTYPES, ModelConfig
from tidemill.model.hub import adopt_tokenizer
from tidemill.model.inventory import inventory
from tidemill.model.names import TEXT_PREFIX, ExpertForm, FileTensor, Layout, in_storage_order
from tidemill.model.shards import MAX_SHARD_BYTES, Shard, plan_shards, write_index
from tidemill.model.tensor_bytes import TensorFile, TensorPlan, stream_tensors, tensor_entry

JOURNAL = "conversion.json"
EXPERTS = {"mxfp4": None, "bf16": "bfloat16", "f32": "float32", "keep": None}
LAYOUTS = ("per-expert", "stacked", "keep")
_SCHEMA = "conversion/1"
_COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
               "merges.txt", "tiktoken.model", "chat_template.jinja", "generation_config.json",
               "preprocessor_config.json", "LICENSE", "THIRD_PARTY_NOTICES.md")

Progress = Callable[[str, int, int], None]
"""(tensor or file in work, bytes done, bytes in all)."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the new folder is to look like. `keep`: as in the old one."""

    experts: str = "keep"
    """`mxfp4`: packed; `bf16`, `f32`: plain, which must be the dtype of the model."""
    layout: str = "keep"
    """`per-expert` or `stacked`."""
    dtype: str | None = None
    """dtype of the model; naming it allows rounding to it. None: as config.json says, and nothing is rounded."""
    max_shard_bytes: int = MAX_SHARD_BYTES

    def __post_init__(self) -> None:
        for name, value, allowed in (("experts", self.experts, tuple(EXPERTS)), ("layout", self.layout, LAYOUTS),
                                     ("dtype", self.dtype, (None, *DTYPES))):
            if value not in allowed:
                raise InputError(f"{name} = {value!r}: expected {', '.join(str(a) for a in allowed if a)}", field=name)
        if self.max_shard_bytes < 1:
            raise InputError(f"max_shard_bytes = {self.max_shard_bytes}: expected a number above 0",
                             field="max_shard_bytes")


def convert(source: Path, target: Path, wanted: Wanted, progress: Progress | None = None) -> BaseManifest:
    """Convert folder `source` into folder `target`, or go on with a conversion of the same kind that was cut off there.

    Packed experts that stay packed keep their bytes; others are encoded by tidemill.kernels.mxfp4. Vision tensors and
    tokenizer files are copied. Raises ConfigError, ManifestError or IntegrityError as Checkpoint.open and .read do,
    InputError if `target` holds anything else than such a conversion or the choices contradict each other, and
    CapacityError if the disk has too little room; no partial shard remains.
    """
    if target.resolve() == source.resolve():
        raise InputError(f"{target} is the source itself", field="target", remedy="Name another folder.")
    checkpoint = Checkpoint.open(source)
    config, form = _target(checkpoint, wanted)
    content = _Content(checkpoint, config, form, rounding=wanted.dtype is not None)
    shards = plan_shards(content.groups(), wanted.max_shard_bytes)
    journal = _Journal.open(target, _job(checkpoint, wanted))
    _check_room(target, shards, journal)
    meter = _Meter(progress, sum(shard.nbytes for shard in shards))
    entries: list[TensorEntry] = []
    for shard in shards:
        done = journal.verified(shard)
        if done is None:
            written = stream_tensors(target / shard.name, shard.tensors, lambda t: meter.count(t, content.pieces(t)))
            journal.add(shard, written.sha256)
            done = list(written.entries)
        else:
            meter.skip(shard)
        entries += done
    copy_companions(source, target)
    adopt_tokenizer(target)
    config.write(target)
    write_index(target, shards)
    return write_manifest(target, config, (dataclasses.replace(e, name=e.name.removeprefix(TEXT_PREFIX))
                                           for e in entries))


def copy_companions(source: Path, target: Path) -> None:
    """Copy what belongs to a model beside its weights: tokenizer files, generation settings, licence."""
    for name in _COMPANIONS:
        if (source / name).is_file():
            write_atomic(target / name, (source / name).read_bytes())


def _target(checkpoint: Checkpoint, wanted: Wanted) -> tuple[ModelConfig, ExpertForm]:
    """Configuration and expert form of the new folder. InputError if the choices contradict each other."""
    forms = set(checkpoint.forms.values())
    text = checkpoint.config.text_config
    text = dataclasses.replace(text, dtype=wanted.dtype or text.dtype)
    if wanted.experts == "keep":
        if len({form.quantized for form in forms}) > 1:
            raise InputError("experts = 'keep': some layers have packed experts and some plain ones", field="experts",
                             remedy="Choose --experts mxfp4 or --experts bf16.")
        quantized = text.quantize_experts
    else:
        quantized, plain = wanted.experts == "mxfp4", EXPERTS[wanted.experts]
        if plain not in (None, text.dtype):
            raise InputError(f"experts = {wanted.experts!r}, but the model is {text.dtype}", field="experts",
                             remedy=f"Add --dtype {plain}, or choose --experts "
                                    f"{'f32' if text.dtype == 'float32' else 'bf16'}.")
    layouts: set[Layout] = {form.layout for form in forms}
    layout: Layout = "stacked" if wanted.layout == "stacked" or (
        wanted.layout == "keep" and layouts == {"stacked"}) else "per-expert"
    text = dataclasses.replace(text, quantize_experts=quantized)
    return dataclasses.replace(checkpoint.config, text_config=text), ExpertForm(layout, quantized)


def _job(checkpoint: Checkpoint, wanted: Wanted) -> str:
    """What identifies a conversion: the source's files as they are now, and the choices."""
    files = [[f.path.name, f.nbytes, f.path.stat().st_mtime_ns, f.header_digest] for f in checkpoint.files()]
    return digest_json([_SCHEMA, checkpoint.config.digest, files, dataclasses.asdict(wanted)])


class _Content:
    """The tensors of the new folder, made from the old one."""

    def __init__(self, source: Checkpoint, config: ModelConfig, form: ExpertForm, *, rounding: bool) -> None:
        self._source, self._specs, self._form = source, inventory(config.text_config), form
        self._rounding, self._text = rounding, config.text_config
        self._prefix = TEXT_PREFIX if source.prefixed else ""
        self._parts: dict[str, FileTensor] = {}
        self._scales: dict[tuple[str, int], Tensor] = {}

    def groups(self) -> Iterator[list[TensorPlan]]:
        """The tensors in storage order, those of one stack together; vision tensors last, under their own names."""
        for spec in self._specs.values():
            group: list[TensorPlan] = []
            for part in in_storage_order(spec, self._form):
                plan = dataclasses.replace(part.plan, name=self._prefix + part.name)
                self._parts[plan.name] = part
                group.append(plan)
            yield group
        for plan in self._source.vision.values():
            yield [plan]

    def pieces(self, plan: TensorPlan) -> Iterator[Tensor]:
        """The values of one tensor, expert by expert for a stack."""
        part = self._parts.get(plan.name)
        if part is None:
            yield self._source.read_vision(plan.name)
            return
        spec = self._specs[part.stacked]
        dtype = getattr(torch, part.dtype)
        if not spec.is_expert:
            yield self._source.read(spec.name, dtype=dtype, rounding=self._rounding)
            return
        for e in range(spec.shape[0]) if part.expert is None else [part.expert]:
            if part.part == "weight":
                yield self._source.read(spec.name, expert=e, dtype=dtype, rounding=self._rounding)
            elif part.part == "packed":
                packed, self._scales[spec.name, e] = self._packed(spec.name, e)
                yield packed
            else:
                # A run that goes on behind the packed half of a stack has not seen its scales.
                scale = self._scales.pop((spec.name, e), None)
                yield self._packed(spec.name, e)[1] if scale is None else scale

    def _packed(self, name: str, expert: int) -> tuple[Tensor, Tensor]:
        if self._source.forms[name].quantized:
            return self._source.packed(name, expert)
        return mxfp4.encode(self._source.read(name, expert=expert, dtype=torch.float32))


@dataclass
class _Journal:
    """conversion.json: the job, and the shards that are finished."""

    folder: Path
    job: str
    done: dict[str, str]

    @classmethod
    def open(cls, folder: Path, job: str) -> _Journal:
        """The journal of `folder`, which is made if needed. InputError if the folder holds something else."""
        path = folder / JOURNAL
        if not path.exists():
            if folder.exists() and (not folder.is_dir() or any(not _is_part(p) for p in folder.iterdir())):
                raise InputError(f"{folder} exists and is not empty", field="target",
                                 remedy="Name a new folder, or remove this one.")
            folder.mkdir(parents=True, exist_ok=True)
            journal = cls(folder, job, {})
            journal._write()
            journal._remove_parts()
            return journal
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            journal = cls(folder, str(data["job"]), {str(s["name"]): str(s["sha256"]) for s in data["shards"]})
        except (ValueError, KeyError, TypeError) as e:
            raise InputError(f"{path} is malformed: {e!r}", field="target", remedy=f"Remove {folder}.") from e
        if journal.job != job:
            raise InputError(f"{folder} holds a conversion of other weights or with other choices", field="target",
                             remedy=f"Give the same command again to finish it, or remove {folder}.")
        journal._remove_parts()
        return journal

    def _remove_parts(self) -> None:
        """What a killed run left of the file it was writing."""
        for path in self.folder.iterdir():
            if _is_part(path):
                path.unlink()

    def verified(self, shard: Shard) -> list[TensorEntry] | None:
        """The manifest lines of a shard that an earlier run finished; None if it has to be written (again)."""
        path = self.folder / shard.name
        if shard.name not in self.done or not path.is_file() or digest_file(path) != self.done[shard.name]:
            return None
        file = TensorFile(path)
        return [tensor_entry(name, file.tensor(name)) for name in file.names()]

    def add(self, shard: Shard, sha256: str) -> None:
        self.done[shard.name] = sha256
        self._write()

    def _write(self) -> None:
        rows: list[dict[str, Any]] = [{"name": name, "sha256": sha} for name, sha in self.done.items()]
        write_json(self.folder / JOURNAL, {"schema": _SCHEMA, "job": self.job, "shards": rows})


def _is_part(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".part")


def _check_room(folder: Path, shards: list[Shard], journal: _Journal) -> None:
    need = sum(shard.nbytes for shard in shards if shard.name not in journal.done)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise CapacityError(f"{folder}: {need:,} bytes are still to be written and {free:,} are free on its disk",
                            field="target", remedy="Free space and give the command again; finished shards are kept.")


class _Meter:
    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def count(self, plan: TensorPlan, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        for piece in pieces:
            size = piece.numel() * piece.element_size()
            yield piece
            del piece  # see stream_tensors: not held while the next one is made
            self._advance(plan.name, size)

    def skip(self, shard: Shard) -> None:
        self._advance(shard.name, shard.nbytes)

    def _advance(self, name: str, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(name, self._done, self._total)


