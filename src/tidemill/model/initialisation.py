"""Fresh parameters. Every tensor is initialised on purpose; a name without a rule is an error, not a default.

Linear maps and the embedding N(0, initializer_range), router Kaiming-uniform (a = √5), convolutions as torch.nn.Conv1d,
gains one, pseudo-queries zero (every residual mixture starts as a plain mean), A_log zero for the bounded decay and
log U(1, 16) for the unbounded one, dt_bias the inverse softplus of a log-uniform step in [1e-3, 1e-1], selection bias
zero, padding token's embedding zero. Sources: K3
technical report; flash-linear-attention for dt_bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from tidemill.model.config import TextConfig

_DT_RANGE = (1e-3, 1e-1)
_A_RANGE = (1.0, 16.0)
_DT_FLOOR = 1e-4

Fill = Callable[[Tensor, TextConfig, Generator], None]


def reset_parameters(model: nn.Module, config: TextConfig, seed: int) -> None:
    """Fill all parameters and buffers in place, in the order of their names."""
    generator = Generator().manual_seed(seed)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name in sorted(tensors):
            _rule(name)(tensors[name], config, generator)
        if config.pad_token_id is not None:
            tensors["model.embed_tokens.weight"][config.pad_token_id].zero_()


def _normal(x: Tensor, config: TextConfig, generator: Generator) -> None:
    x.normal_(0.0, config.initializer_range, generator=generator)


def _ones(x: Tensor, config: TextConfig, generator: Generator) -> None:
    x.fill_(1.0)


def _zeros(x: Tensor, config: TextConfig, generator: Generator) -> None:
    x.zero_()


def _kaiming(x: Tensor, config: TextConfig, generator: Generator) -> None:
    """Kaiming-uniform with a = √5: U(±1/√fan_in)."""
    bound = 1.0 / math.sqrt(math.prod(x.shape[1:]))
    x.uniform_(-bound, bound, generator=generator)


def _a_log(x: Tensor, config: TextConfig, generator: Generator) -> None:
    if config.linear_attn_config.gate_lower_bound is None:
        x.uniform_(*_A_RANGE, generator=generator).log_()
    else:
        x.zero_()


def _dt_bias(x: Tensor, config: TextConfig, generator: Generator) -> None:
    low, high = (math.log(v) for v in _DT_RANGE)
    dt = x.uniform_(low, high, generator=generator).exp_().clamp_min_(_DT_FLOOR)
    dt.add_(torch.log(-torch.expm1(-dt)))


_RULES: tuple[tuple[str, Fill], ...] = (
    ("embed_tokens.weight", _normal),
    ("norm.weight", _ones),
    ("_layernorm.weight", _ones),
    ("_res_proj.weight", _zeros),
    ("_conv1d.weight", _kaiming),
    ("block_sparse_moe.gate.weight", _kaiming),
    ("e_score_correction_bias", _zeros),
    ("A_log", _a_log),
    ("dt_bias", _dt_bias),
    ("_proj.weight", _normal),
    ("kv_a_proj_with_mqa.weight", _normal),
    ("experts.w1", _normal),
    ("experts.w2", _normal),
    ("experts.w3", _normal),
    ("lm_head.weight", _normal),
)


def _rule(name: str) -> Fill:
    for suffix, fill in _RULES:
        if name.endswith(suffix):
            return fill
    raise AssertionError(f"no initialisation rule for {name}")
