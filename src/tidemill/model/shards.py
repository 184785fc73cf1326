"""The safetensors files of a model folder: found and cross-checked when read, cut to size when written.

A folder holds one model.safetensors, or shards `model-00001-of-00002.safetensors` with (or without) an index
model.safetensors.index.json whose `weight_map` says which tensor lies in which shard. File names are Hugging Face's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tidemill.core.config import require
from tidemill.core.errors import IntegrityError, ManifestError
from tidemill.core.files import write_json
from tidemill.model.tensor_bytes import TensorFile, TensorPlan

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
_SHARD = re.compile(r"^model-(\d+)-of-(\d+)\.safetensors$")
_AGAIN = "Copy the folder again, whole."


def open_shards(folder: Path) -> dict[str, TensorFile]:
    """Every tensor of the folder's weight files and the file that holds it, by name in the files.

    IntegrityError naming file and tensor if a file is missing, cut short or corrupt; ManifestError if a tensor lies in
    two files, or index and files disagree.
    """
    index = folder / INDEX
    listed = _indexed(index) if index.exists() else None
    where: dict[str, TensorFile] = {}
    for file in (TensorFile(folder / name) for name in listed or _unindexed(folder)):
        for tensor in file.names():
            if tensor in where:
                raise ManifestError(f"{tensor} lies in {where[tensor].path} and in {file.path}",
                                    remedy="Remove the file that does not belong to this model.")
            where[tensor] = file
    if listed is not None:
        _check_index(index, listed, where)
    return where


def _indexed(index: Path) -> dict[str, list[str]]:
    """Tensors by shard, as the index says."""
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, list[str]] = {}
        for tensor, shard in cast("Mapping[str, Any]", found).items():
            shards.setdefault(str(shard), []).append(tensor)
    except OSError as e:
        raise ManifestError(f"cannot read {index}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ManifestError(f"{index} is malformed: {e!r}", remedy=_AGAIN) from e
    if not shards:
        raise ManifestError(f"{index} lists no tensors", remedy=_AGAIN)
    for shard, tensors in shards.items():
        if Path(shard).name != shard:
            raise ManifestError(f"{index}: {tensors[0]} is said to lie in {shard!r}, which is no file of this folder")
        if not (index.parent / shard).is_file():
            raise IntegrityError(f"{index.parent / shard} is missing; {index.name} says that it holds {tensors[0]} "
                                 f"({len(tensors)} tensors in all)", remedy=_AGAIN)
    return shards


def _check_index(index: Path, shards: Mapping[str, list[str]], where: Mapping[str, TensorFile]) -> None:
    listed = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    for tensor, shard in listed.items():
        if tensor not in where or where[tensor].path.name != shard:
            raise ManifestError(f"{index.parent / shard} holds no tensor {tensor}, though {index.name} says so",
                                remedy=_AGAIN)
    unlisted = [tensor for tensor in where if tensor not in listed]
    if unlisted:
        raise ManifestError(f"{where[unlisted[0]].path} holds {unlisted[0]}, which {index.name} does not list "
                            f"({len(unlisted)} tensors in all)", remedy="Index and shards are of two models: " + _AGAIN)


def _unindexed(folder: Path) -> list[str]:
    """The weight files of a folder without an index."""
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    single = (folder / WEIGHTS).is_file()
    if not shards:
        if not single:
            raise IntegrityError(f"{folder / WEIGHTS} is missing, and there are neither shards nor {INDEX}")
        return [WEIGHTS]
    if single:
        raise ManifestError(f"{folder} holds {WEIGHTS} and {shards[0]} and no {INDEX}: it is unclear which are the "
                            "weights", remedy="Remove what does not belong to this model.")
    for name in shards:
        match = _SHARD.match(name)
        if match is None:
            continue
        wanted = {f"model-{i:0{len(match[1])}d}-of-{match[2]}.safetensors" for i in range(1, int(match[2]) + 1)}
        missing = sorted(wanted - set(shards))
        if missing:
            raise IntegrityError(f"{folder / missing[0]} is missing ({len(missing)} of {len(wanted)} shards in all)",
                                 remedy=_AGAIN)
    return shards


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to be written."""

    name: str
    tensors: tuple[TensorPlan, ...]

    @property
    def nbytes(self) -> int:
        """Of the tensors; the header comes on top."""
        return sum(t.nbytes for t in self.tensors)


def plan_shards(groups: Iterable[Sequence[TensorPlan]], max_bytes: int) -> list[Shard]:
    """Files of at most `max_bytes` of tensors each, filled in order; a tensor that is larger gets a file of its own.

    The tensors of a group stay together unless they do not fit into one file. ConfigError if max_bytes is below 1.
    """
    require(max_bytes >= 1, field="max_shard_bytes", value=max_bytes, expected="a number of bytes above 0")
    files: list[list[TensorPlan]] = [[]]
    room = max_bytes
    for group in groups:
        size = sum(t.nbytes for t in group)
        for unit in [group] if size <= max_bytes else [[t] for t in group]:
            size = sum(t.nbytes for t in unit)
            if size > room and files[-1]:
                files.append([])
                room = max_bytes
            files[-1] += unit
            room -= size
    if len(files) == 1:
        return [Shard(WEIGHTS, tuple(files[0]))]
    return [Shard(f"model-{i:05d}-of-{len(files):05d}.safetensors", tuple(f)) for i, f in enumerate(files, 1)]


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Write the index of several shards; for a single file remove one that lies there. Removes weight files of an
    earlier model, so that only `shards` remain."""
    keep = {shard.name for shard in shards}
    for path in folder.glob("model*.safetensors"):
        if path.name not in keep:
            path.unlink()
    if len(shards) == 1:
        (folder / INDEX).unlink(missing_ok=True)
        return
    write_json(folder / INDEX, {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": {t.name: shard.name for shard in shards for t in shard.tensors},
    })
