"""Adapters on disk: adapter_model.safetensors and adapter_config.json as PEFT names them, and our manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from tidemill.core.config import parse_config
from tidemill.core.errors import ManifestError
from tidemill.core.files import write_json
from tidemill.core.manifest import AdapterManifest
from tidemill.model.lora import LoraConfig, verify_tensors
from tidemill.model.tensor_bytes import TensorFile, write_tensors

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
MANIFEST = "adapter-manifest.json"
PREFIX = "base_model.model."

_MODULES = {
    "attn_out": ("o_proj",),
    "mla_down": ("q_a_proj", "kv_a_proj_with_mqa"),
    "dense": ("gate_proj", "up_proj", "down_proj"),
    "shared_experts": ("gate_proj", "up_proj", "down_proj"),
    "experts": ("w1", "w2", "w3"),
}


def write_adapter(folder: Path, lora: LoraConfig, tensors: Mapping[str, Tensor], manifest: AdapterManifest) -> None:
    """Write an exported adapter; tensors get PEFT's `base_model.model.` prefix. The manifest is written last, and one
    that lies there is removed first, so that a folder with a manifest is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    write_tensors(folder / WEIGHTS, ((PREFIX + name, x) for name, x in tensors.items()))
    own = {"tidemill": {"targets": list(lora.targets), "dtype": lora.dtype}}
    write_json(folder / CONFIG, peft_config(lora) | own)
    write_json(folder / MANIFEST, manifest.to_json())


def peft_config(lora: LoraConfig) -> dict[str, Any]:
    """The fields of adapter_config.json that PEFT needs."""
    modules = sorted({name for target in lora.targets for name in _MODULES[target]})
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0,
        "bias": "none", "target_modules": modules, "inference_mode": True,
    }


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, Tensor], AdapterManifest]:
    """Read and verify a folder that `write_adapter` made. ManifestError or IntegrityError naming what is wrong."""
    raw, manifest = _read_json(folder / CONFIG), read_manifest(folder)
    try:
        fields = {"rank": raw["r"], "alpha": raw["lora_alpha"], **raw["tidemill"]}
    except (KeyError, TypeError) as e:
        raise ManifestError(f"{folder / CONFIG} is malformed: {e!r}") from e
    lora = parse_config(LoraConfig, fields, source=str(folder / CONFIG))
    file = TensorFile(folder / WEIGHTS)
    tensors = {name.removeprefix(PREFIX): file.tensor(name) for name in file.names()}
    verify_tensors(tensors, manifest)
    return lora, tensors, manifest


def read_manifest(folder: Path) -> AdapterManifest:
    """The manifest of an adapter's folder. ManifestError if it is missing or contradicts itself."""
    return AdapterManifest.from_json(_read_json(folder / MANIFEST))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ManifestError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise ManifestError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(data, dict):
        raise ManifestError(f"{path}: the top level is a {type(data).__name__}, expected a mapping")
    return cast("dict[str, Any]", data)
