"""From a folder on disk to a running EngineCore: what to load, and loading it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from tidemill.core.config import require, strict_config
from tidemill.engine.config import EngineConfig
from tidemill.engine.core import EngineCore
from tidemill.engine.weights import EngineWeights
from tidemill.model.base import BaseStore
from tidemill.model.peft_files import read_adapter
from tidemill.model.tensor_bytes import tensor_bytes


@strict_config
@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What an engine serves and how big it is."""

    model: Path
    """Folder of a base (config.json, model.safetensors, base-manifest.json)."""
    config: EngineConfig = field(default_factory=EngineConfig)
    adapter: Path | None = None
    """PEFT folder with our manifest, loaded before the first request."""
    name: str = ""
    """Model name in EngineInfo; empty: the folder's name."""
    verify: bool = True
    """Hash the whole base at start."""
    threads: int = 1
    """torch threads of a spawned engine; an embedded one uses its host's setting. Results do not depend on it."""

    def __post_init__(self) -> None:
        require(self.threads >= 1, field="threads", value=self.threads, expected="an integer >= 1")


def load_core(spec: EngineSpec) -> EngineCore:
    """Open, verify, plan, allocate. Raises ConfigError, ManifestError, IntegrityError, CapacityError."""
    store = BaseStore.open(spec.model, verify=spec.verify)
    core = EngineCore(EngineWeights(store, name=spec.name or spec.model.name), spec.config)
    if spec.adapter is not None:
        load_adapter_folder(core, spec.adapter)
    return core


def load_adapter_folder(core: EngineCore, folder: Path) -> None:
    """Serve an adapter from disk, through the same checks as a sync, one tensor a chunk."""
    lora, tensors, manifest = read_adapter(folder)
    core.adapters.begin(manifest, lora.to_adapter_config(), len(tensors))
    for index, (name, value) in enumerate(tensors.items()):
        core.adapters.chunk(index, (name,), bytes(tensor_bytes(value)))
    core.adapters.commit(manifest.version)


def use_threads(count: int) -> None:
    """torch threads of this process."""
    torch.set_num_threads(count)
