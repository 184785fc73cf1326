"""A base with random weights in memory, for engine tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tidemill.kernels import mxfp4
from tidemill.model.config import DTYPES, K3Config
from tidemill.model.inventory import TensorSpec, inventory


class RandomBase:
    """WeightSource with weights drawn from a seed, every mechanism switched on (gains, biases, decays all spread)."""

    def __init__(self, config: K3Config, seed: int = 0) -> None:
        self.config = config
        self.digest = f"sha256:random-{seed}"
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {spec.name: _draw(spec, generator) for spec in inventory(config.text_config).values()}

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def expert(self, name: str, index: int) -> Tensor:
        return self.tensors[name][index]

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def verify(self, names: Sequence[str] | None = None) -> None:
        assert all(name in self.tensors for name in names or ())


def _draw(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    def normal(std: float, mean: float = 0.0) -> Tensor:
        return torch.randn(spec.shape, generator=generator) * std + mean

    if spec.is_expert:
        return mxfp4.decode(*mxfp4.encode(normal(2 * spec.shape[-1] ** -0.5)), DTYPES[spec.dtype])
    if spec.name.endswith(("norm.weight", "layernorm.weight")):
        value = normal(0.25, 1.0)
    elif spec.name.endswith("A_log"):
        value = normal(0.4, 0.25)
    elif spec.name.endswith("dt_bias"):
        value = normal(2.0, -2.5)
    elif spec.name.endswith("e_score_correction_bias"):
        value = normal(0.3)
    elif spec.name.endswith("res_proj.weight"):
        value = normal(1.3 * spec.shape[-1] ** -0.5)
    elif spec.name.endswith("conv1d.weight"):
        value = normal(0.6)
    elif spec.name.endswith("embed_tokens.weight"):
        value = normal(1.0)
    else:
        value = normal(1.5 * spec.shape[-1] ** -0.5)
    return value.to(DTYPES[spec.dtype])
