"""Stable LatentMoE: sigmoid router, routed experts in a latent space, a norm after the combination, shared experts.

Without a latent width (Kimi Linear) the routed experts read and write the full width.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor, nn

from tidemill.core.errors import InputError
from tidemill.kernels.moe import ExpertLora, experts_train, route_train
from tidemill.kernels.mxfp8 import BLOCK
from tidemill.model.config import DTYPES, TextConfig
from tidemill.model.layers.linear import Linear, RMSNorm
from tidemill.model.layers.mlp import GatedMLP
from tidemill.model.quant import Quantization, fake_quant
from tidemill.parallel import ParallelContext, share


class Router(nn.Module):
    """weight[E, d] and the selection bias, which is a buffer: quantile balancing moves it, gradients do not."""

    e_score_correction_bias: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=config.torch_dtype))
        bias = torch.zeros(config.num_experts, dtype=DTYPES[config.exact_dtype])
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x[R, d] -> (ids[R, k], weights[R, k], scores[R, E])."""
        c = self.config
        return route_train(x, self.weight, self.e_score_correction_bias, c.num_experts_per_token, c.moe_renormalize,
                           c.routed_scaling_factor)


class RoutedExperts(nn.Module):
    """Stacks w1 (gate), w3 (up) [E, I, l] and w2 (down) [E, l, I]; optionally with low-rank factors."""

    lora_a13: nn.Parameter | None
    lora_b1: nn.Parameter | None
    lora_b3: nn.Parameter | None
    lora_a2: nn.Parameter | None
    lora_b2: nn.Parameter | None

    def __init__(self, config: TextConfig, parallel: ParallelContext) -> None:
        super().__init__()
        count = share(config.num_experts, parallel.expert, what="num_experts")
        latent, inner, dtype = config.expert_width, config.moe_intermediate_size, config.torch_dtype
        latent_name = "hidden_size" if config.routed_expert_hidden_size is None else "routed_expert_hidden_size"
        self._widths = {latent_name: latent, "moe_intermediate_size": inner}
        self.act = config.glu_act
        self.w1 = nn.Parameter(torch.empty(count, inner, latent, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(count, latent, inner, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(count, inner, latent, dtype=dtype))
        for name in ("lora_a13", "lora_b1", "lora_b3", "lora_a2", "lora_b2"):
            self.register_parameter(name, None)
        self.lora_scale = 0.0
        self._quantization: Quantization = "none"

    @property
    def quantization(self) -> Quantization:
        """How weights and activations are rounded; "none" at first. Gradients pass straight through.

        Setting it raises InputError on an unknown value, and if a width does not fill blocks of 32.
        """
        return self._quantization

    @quantization.setter
    def quantization(self, value: Quantization) -> None:
        if value not in get_args(Quantization):
            raise InputError(f"quantization = {value!r}: expected one of {', '.join(get_args(Quantization))}",
                             field="quantization")
        if value != "none":
            for name, width in self._widths.items():
                if width % BLOCK:
                    raise InputError(f"{name} = {width}: quantised experts need a multiple of {BLOCK}", field=name,
                                     remedy=f"Use {width + -width % BLOCK}, or quantization = 'none'.")
        self._quantization = value

    def lora(self) -> ExpertLora | None:
        """The attached factors, if any, in the dtype of the weights."""
        a13, b1, b3, a2, b2 = self.lora_a13, self.lora_b1, self.lora_b3, self.lora_a2, self.lora_b2
        if a13 is None or b1 is None or b3 is None or a2 is None or b2 is None:
            return None
        return ExpertLora(*(x.to(self.w1.dtype) for x in (a13, b1, b3, a2, b2)), scale=self.lora_scale)

    def forward(self, z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        w1, w2, w3 = self.w1, self.w2, self.w3
        if self._quantization != "none":
            w1, w2, w3 = fake_quant(w1), fake_quant(w2), fake_quant(w3)
        return experts_train(z, ids, weights, w1, w3, w2, self.act, self.lora(),
                             mxfp8_inputs=self._quantization == "weights+activations")


class LatentMoE(nn.Module):
    """x[R, d] -> (y[R, d], router scores[R, E]). Router and shared experts read x at full width."""

    def __init__(self, config: TextConfig, parallel: ParallelContext) -> None:
        super().__init__()
        d, latent, dtype = config.hidden_size, config.expert_width, config.torch_dtype
        self.parallel = parallel
        self.gate = Router(config)
        self.has_latent = config.routed_expert_hidden_size is not None
        if self.has_latent:
            self.routed_expert_down_proj = Linear(d, latent, dtype)
        self.experts = RoutedExperts(config, parallel)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, dtype) if config.latent_moe_use_norm else None
        if self.has_latent:
            self.routed_expert_up_proj = Linear(latent, d, dtype)
        self.shared_experts = GatedMLP(config, config.shared_intermediate_size, parallel, what="shared_experts width")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights, scores = self.gate(x)
        z = self.routed_expert_down_proj(x) if self.has_latent else x
        u = self.experts(z, ids, weights)
        # The norm needs the whole combination, so partial sums of expert ranks are joined before it.
        u = self.parallel.expert.all_reduce(u)
        if self.routed_expert_norm is not None:
            u = self.routed_expert_norm(u)
        if self.has_latent:
            u = self.routed_expert_up_proj(u)
        return u + self.shared_experts(x), scores
