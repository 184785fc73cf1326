"""Which parameter is trained how: Muon for hidden matrices, AdamW for the rest, weight decay where it belongs.

AdamW takes embedding and head, pseudo-queries, gains, convolutions, A_log and dt_bias. Only embedding, head and Muon's
matrices decay: decay would pull gains, gates and time steps towards values that mean something. Source: K3 technical
report for Muon and for A_log and dt_bias.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tidemill.core.config import require, require_positive, strict_config
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import TextConfig
from tidemill.train.pretrain.muon import Cut, Muon


@strict_config
@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """`lr` is the peak for Muon and AdamW alike."""

    lr: float = 4e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    """Of Muon."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    grad_clip: float = 1.0
    """Largest norm of the gradient of all parameters together."""

    def __post_init__(self) -> None:
        require_positive(self, "lr", "grad_clip")
        for value in (self.momentum, *self.betas):
            require(0 <= value < 1, field="momentum, betas", value=value, expected="0 <= x < 1")
        require(self.weight_decay >= 0, field="weight_decay", value=self.weight_decay, expected="a number >= 0")


_ADAM_WITH_DECAY = ("embed_tokens.weight", "lm_head.weight")
_HEADS = re.compile(r"layers\.(\d+)\.self_attn\.(q|k|v|q_b|kv_b)_proj\.weight$")
"""Query, key and value maps: each head's slice is a matrix of its own."""


def cut_of(name: str, x: Tensor, config: TextConfig) -> Cut | None:
    """How Muon sees a parameter; None if AdamW trains it."""
    if name.endswith(_ADAM_WITH_DECAY) or name.endswith(("_res_proj.weight", "_conv1d.weight")) or x.dim() < 2:
        return None
    found = _HEADS.search(name)
    if found is not None:
        return _cut_into_heads(found[2], config, is_mla=int(found[1]) in config.mla_layers)
    return Cut(x.shape[0], (x.shape[1],)) if x.dim() == 3 else Cut(1, (x.shape[0],))


def _cut_into_heads(which: str, config: TextConfig, *, is_mla: bool) -> Cut:
    if not is_mla:
        return Cut(config.linear_attn_config.num_heads, (config.linear_attn_config.head_dim,))
    parts = (config.qk_nope_head_dim, config.v_head_dim) if which == "kv_b" else (config.qk_head_dim,)
    return Cut(config.num_attention_heads, parts)


class Optimizers:
    """Muon and AdamW over all parameters of a model, stepped together."""

    def __init__(self, model: CausalLM, settings: OptimizerSection) -> None:
        self._settings, self._parameters = settings, list(model.parameters())
        hidden: list[tuple[Parameter, Cut]] = []
        decayed: list[Parameter] = []
        plain: list[Parameter] = []
        for name, p in model.named_parameters():
            cut = cut_of(name, p, model.config.text_config)
            if cut is not None:
                hidden.append((p, cut))
            else:
                (decayed if name.endswith(_ADAM_WITH_DECAY) else plain).append(p)
        self._muon = Muon(hidden, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, foreach=True)

    def zero_grad(self) -> None:
        self._muon.zero_grad(set_to_none=True)
        self._adam.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Scale all gradients so that their norm is at most grad_clip; returns the norm before."""
        norm = nn.utils.clip_grad_norm_(self._parameters, self._settings.grad_clip, error_if_nonfinite=False)
        return float(norm)

    def step(self, lr_share: float) -> None:
        """Update all parameters with `lr_share` of the peak learning rate."""
        for optimizer in (self._muon, self._adam):
            for group in optimizer.param_groups:
                group["lr"] = self._settings.lr * lr_share
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self._muon.state_dict(), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._muon.load_state_dict(state["muon"])
        self._adam.load_state_dict(state["adam"])
