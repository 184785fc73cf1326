"""Per-head Muon against the singular value decomposition, and which parameter is trained how."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from tidemill.model.causal_lm import CausalLM
from tidemill.model.presets import tiny, tiny_linear
from tidemill.train.pretrain.muon import UPDATE_SIZE, Cut, Muon, orthogonalised
from tidemill.train.pretrain.parameters import Optimizers, OptimizerSection, cut_of

MODEL = CausalLM(tiny(), seed=3)
TEXT = MODEL.config.text_config


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 2**20), st.floats(1e-6, 1e6))
def test_singular_vectors_stay_and_singular_values_come_near_one(rows: int, cols: int, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(rows, cols, generator=generator), full_matrices=False)
    values = torch.logspace(0, -1.5, min(rows, cols))
    found = orthogonalised((u * values @ vh) * size)
    on_the_vectors = u.mT @ found @ vh.mT
    diagonal = on_the_vectors.diagonal()
    assert bool(((diagonal > 0.6) & (diagonal < 1.3)).all())
    torch.testing.assert_close(on_the_vectors, diagonal.diag(), atol=1e-4, rtol=0)
    torch.testing.assert_close(found, u * diagonal @ vh, atol=1e-4, rtol=0)


def test_a_zero_matrix_stays_zero() -> None:
    assert not orthogonalised(torch.zeros(3, 4)).any()


@pytest.mark.parametrize(("name", "parts"), [
    ("layers.0.self_attn.q_proj", (16,)), ("layers.1.self_attn.v_proj", (16,)), ("layers.3.self_attn.q_b_proj", (24,)),
    ("layers.6.self_attn.kv_b_proj", (16, 24)),
])
def test_a_head_is_updated_as_if_it_were_alone(name: str, parts: tuple[int, ...]) -> None:
    p = dict(MODEL.named_parameters())[f"model.{name}.weight"]
    cut = cut_of(f"model.{name}.weight", p, TEXT)
    assert cut == Cut(3, parts)
    torch.manual_seed(1)
    gradient = torch.randn_like(p)
    whole = stepped(p, gradient, cut)
    heads = zip(p.detach().view(3, -1, p.shape[1]), gradient.view(3, -1, p.shape[1]), strict=True)
    for number, (weights, gradients) in enumerate(heads):
        parts = zip(weights.split(cut.parts), gradients.split(cut.parts), strict=True)
        alone = torch.cat([stepped(w, g, Cut(1, (w.shape[0],))) for w, g in parts])
        torch.testing.assert_close(whole.view(3, -1, p.shape[1])[number], alone)
    together = stepped(p, gradient, Cut(1, (p.shape[0],)))
    assert not torch.allclose(whole, together, atol=1e-4)


def test_the_query_map_of_an_mla_layer_without_query_latent_has_the_heads_of_mla() -> None:
    text = tiny_linear().text_config
    kda, mla = (cut_of(f"model.layers.{layer}.self_attn.q_proj.weight", torch.empty(48, 64), text) for layer in (0, 3))
    assert kda == Cut(2, (32,))
    assert mla == Cut(2, (24,))


def test_an_expert_is_updated_as_if_it_were_alone() -> None:
    name, p = next((n, p) for n, p in MODEL.named_parameters() if n.endswith("experts.w1"))
    cut = cut_of(name, p, TEXT)
    assert cut is not None
    gradient = torch.randn_like(p)
    whole = stepped(p, gradient, cut)
    for expert in range(p.shape[0]):
        alone = stepped(p.detach()[expert], gradient[expert], Cut(1, (p.shape[1],)))
        torch.testing.assert_close(whole[expert], alone)


def stepped(p: torch.Tensor, gradient: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Two Muon steps from `p` with the same gradient."""
    weight = Parameter(p.detach().clone())
    optimizer = Muon([(weight, cut)], lr=0.1, momentum=0.9, weight_decay=0.2)
    for _ in range(2):
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def test_the_update_is_decay_and_an_orthogonal_step_along_momentum() -> None:
    torch.manual_seed(0)
    p, gradient = torch.randn(8, 5), torch.randn(8, 5)
    weight = Parameter(p.clone())
    optimizer = Muon([(weight, Cut(1, (8,)))], lr=0.1, momentum=0.9, weight_decay=0.2)
    weight.grad = gradient.clone()
    optimizer.step()
    step = 0.1 * UPDATE_SIZE * math.sqrt(8) * orthogonalised(1.9 * gradient)
    torch.testing.assert_close(weight.detach(), p * (1 - 0.1 * 0.2) - step)


def test_muon_has_the_hidden_matrices_and_adamw_the_rest() -> None:
    groups = {True: set[str](), False: set[str]()}
    for name, p in MODEL.named_parameters():
        groups[cut_of(name, p, TEXT) is not None].add(re.sub(r"^model\.layers\.\d+\.", "", name))
    assert "mlp.gate_proj.weight" in groups[True]
    assert "self_attn.kv_a_proj_with_mqa.weight" in groups[True]
    assert "block_sparse_moe.gate.weight" in groups[True]
    assert groups[False] == {
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "model.output_attn_res_norm.weight",
        "model.output_attn_res_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
        "self_attention_res_norm.weight", "self_attention_res_proj.weight", "mlp_res_norm.weight",
        "mlp_res_proj.weight",
        "self_attn.q_conv1d.weight", "self_attn.k_conv1d.weight", "self_attn.v_conv1d.weight", "self_attn.A_log",
        "self_attn.dt_bias", "self_attn.o_norm.weight", "self_attn.q_a_layernorm.weight",
        "self_attn.kv_a_layernorm.weight", "block_sparse_moe.routed_expert_norm.weight",
    }


def test_without_gradient_only_matrices_embedding_and_head_shrink() -> None:
    model = CausalLM(tiny(), seed=3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = Optimizers(model, OptimizerSection(lr=0.5, weight_decay=0.1))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizers.step(0.2)
    for name, p in model.named_parameters():
        decays = cut_of(name, p, TEXT) is not None or name in ("model.embed_tokens.weight", "lm_head.weight")
        torch.testing.assert_close(p.detach(), before[name] * (1 - 0.1 * 0.1 if decays else 1), msg=name)
