"""What a model is, in numbers, and under which licence its weights come. Computes nothing but sizes.

Counts come from the modules themselves, built on the meta device, and from the map of their names to checkpoint names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tidemill.model.causal_lm import CausalLM
from tidemill.model.checkpoint import Checkpoint
from tidemill.model.config import ModelConfig
from tidemill.model.inventory import TensorSpec, active_parameters, inventory, vision_inventory
from tidemill.model.names import ExpertForm, split_stacked
from tidemill.model.presets import k3, kimi_linear_48b
from tidemill.model.shards import INDEX
from tidemill.model.tensor_bytes import TensorPlan, dtype_name

K3_LICENCE = (
    "Kimi K3's own licence. Selling the model as a service needs a separate agreement with its makers once your "
    "revenue passes 20 million USD in any 12 months; a product with more than 100 million monthly users, or more than "
    "20 million USD of revenue a month, must display the name Kimi K3. Read the licence that comes with the weights."
)
KIMI_LINEAR_LICENCE = "MIT, as published; check the model card that comes with the weights."
OWN_LICENCE = "Apache-2.0, the licence of this package."
UNKNOWN_LICENCE = "Not stated in the folder: ask who made the weights."


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Sizes of a model. Bytes are those of the checkpoint's tensors, headers aside."""

    family: str
    components: dict[str, int]
    """Parameters by component, a vision tower's among them."""
    total: int
    active: int
    """Parameters a token is multiplied with: without unchosen experts, input embedding and vision."""
    tensors: int
    """Tensors in the checkpoint."""
    bytes_by_dtype: dict[str, int]
    total_bytes: int
    state_bytes_per_sequence: int
    cache_bytes_per_token: int
    bank_rows: int
    """Rows of d_model values per token in flight that attention residuals keep."""
    max_positions: int
    licence: str


def meta_model(config: ModelConfig) -> CausalLM:
    """The modules without storage."""
    with torch.device("meta"):
        return CausalLM(config, initialise=False)


def describe(config: ModelConfig, *, licence: str, vision: Iterable[TensorPlan] | None = None,
             forms: dict[str, ExpertForm] | None = None) -> ModelInfo:
    """Sizes of a configuration. `forms` says how each stack of experts is stored (None: one by one, packed if the
    configuration says so), `vision` which vision tensors there are (None: all the configuration names)."""
    text = config.text_config
    specs, usual = inventory(text), ExpertForm("per-expert", text.quantize_experts)
    components: dict[str, int] = {}
    sizes: dict[str, int] = {}
    count = 0
    for name, x in meta_model(config).state_dict().items():
        spec = _as_built(specs[name], x)
        components[spec.component] = components.get(spec.component, 0) + spec.numel
        for part in split_stacked(spec, (forms or {}).get(name, usual)):
            sizes[part.dtype] = sizes.get(part.dtype, 0) + part.plan.nbytes
            count += 1
    if vision is None:
        found = vision_inventory(config.vision_config).values() if config.vision_config else ()
        vision = [TensorPlan(spec.name, spec.dtype, spec.shape) for spec in found]
    for plan in vision:
        component = plan.name.partition(".")[0]
        components[component] = components.get(component, 0) + math.prod(plan.shape)
        sizes[plan.dtype] = sizes.get(plan.dtype, 0) + plan.nbytes
        count += 1
    return ModelInfo(
        family=config.family, components=components, total=sum(components.values()), active=active_parameters(text),
        tensors=count, bytes_by_dtype=sizes, total_bytes=sum(sizes.values()),
        state_bytes_per_sequence=text.state_bytes_per_sequence, cache_bytes_per_token=text.mla_bytes_per_token,
        bank_rows=text.num_bank_rows, max_positions=text.max_position_embeddings, licence=licence,
    )


def describe_folder(folder: Path) -> tuple[ModelConfig, ModelInfo]:
    """Sizes of a model folder; of its config.json alone if there are no weights beside it. Raises as Checkpoint.open
    does."""
    if not any(folder.glob("model*.safetensors")) and not (folder / INDEX).exists():
        config = ModelConfig.read(folder)
        return config, describe(config, licence=folder_licence(folder, config))
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    return config, describe(config, licence=folder_licence(folder, config), vision=checkpoint.vision.values(),
                            forms=checkpoint.forms)


def folder_licence(folder: Path, config: ModelConfig) -> str:
    """The licence of the weights in a folder: the released models' by their sizes, otherwise what the folder says."""
    text = config.text_config
    for released, licence in ((k3(), K3_LICENCE), (kimi_linear_48b(), KIMI_LINEAR_LICENCE)):
        other = released.text_config
        if (text.family, text.hidden_size, text.num_hidden_layers) == (
                other.family, other.hidden_size, other.num_hidden_layers):
            return licence
    for name in ("LICENSE", "LICENSE.txt", "LICENSE.md"):
        if (folder / name).is_file():
            return f"See {folder / name}."
    return UNKNOWN_LICENCE


def preset_licence(name: str) -> str:
    """The licence that comes with the weights of a preset's model."""
    return {"k3": K3_LICENCE, "kimi-linear-48b": KIMI_LINEAR_LICENCE}.get(name, OWN_LICENCE)


def _as_built(spec: TensorSpec, x: Tensor) -> TensorSpec:
    return TensorSpec(spec.name, tuple(x.shape), dtype_name(x.dtype), spec.component)
