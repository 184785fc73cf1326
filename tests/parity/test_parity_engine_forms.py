"""The engine's kernels, walked token by token over states and pages, against the training forward, with an adapter
attached.

A walk in the smallest form: no scheduler, no batching rules, just every row-invariant kernel in the order of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.kernels import attn_res, conv, kda, linear, mla, moe, norm, situ
from tidemill.kernels.pointwise import sigmoid
from tidemill.model import lora
from tidemill.model.adapter_view import LayerAdapter, adapter_layers
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import TextConfig
from tidemill.model.presets import tiny, toy

NUM_PAGES = 4


@dataclass
class Walk:
    """B sequences side by side, one token each per call; state in plain tensors."""

    c: TextConfig
    w: dict[str, Tensor]
    adapters: tuple[LayerAdapter, ...]
    batch: int

    def __post_init__(self) -> None:
        lin = self.c.linear_attn_config
        shape = (self.batch, lin.num_heads, lin.head_dim, lin.head_dim)
        self.states = {layer: torch.zeros(shape) for layer in self.c.kda_layers}
        self.taps = {layer: torch.zeros(self.batch, 4, 3 * lin.width) for layer in self.c.kda_layers}
        width = self.c.kv_lora_rank + self.c.qk_rope_head_dim
        self.pages = {layer: torch.zeros(self.batch * NUM_PAGES, mla.PAGE, width) for layer in self.c.mla_layers}
        self.table = torch.arange(self.batch * NUM_PAGES).view(NUM_PAGES, self.batch).t().contiguous()
        self.position = 0

    def lin(self, x: Tensor, layer: int, module: str) -> Tensor:
        y = linear.linear(x, self.w[f"model.layers.{layer}.{module}.weight"])
        factors = self.adapters[layer].get(module)
        return y if factors is None else y + factors.delta(x)

    def norm(self, x: Tensor, layer: int, name: str) -> Tensor:
        return norm.rms_norm(x, self.w[f"model.layers.{layer}.{name}.weight"], self.c.rms_norm_eps)

    def mix(self, sources: list[Tensor], site: str) -> Tensor:
        query = self.w[site + "_norm.weight"] * self.w[site + "_proj.weight"][0]
        return attn_res.mix(torch.stack(sources, 1), query, self.c.rms_norm_eps)

    def kda(self, x: Tensor, layer: int) -> Tensor:
        cfg, p = self.c.linear_attn_config, f"model.layers.{layer}.self_attn."
        heads = (self.batch, cfg.num_heads, cfg.head_dim)
        new = torch.cat([self.lin(x, layer, f"self_attn.{n}_proj") for n in "qkv"], 1)
        self.taps[layer] = torch.cat([self.taps[layer][:, 1:], new.unsqueeze(1)], 1)
        w = torch.cat([self.w[f"{p}{n}_conv1d.weight"] for n in "qkv"])
        q, k, v = (t.reshape(heads) for t in conv.short_conv(self.taps[layer], w).chunk(3, dim=1))
        q, k = kda.qk_norm(q, k)
        z = self.lin(self.lin(x, layer, "self_attn.f_a_proj"), layer, "self_attn.f_b_proj").view(heads)
        g = kda.gate(z, self.w[p + "A_log"], self.w[p + "dt_bias"], cfg.gate_lower_bound)
        beta = sigmoid(self.lin(x, layer, "self_attn.b_proj"))
        o = kda.step(self.states[layer], q, k, v, g, beta)
        gate = self.lin(x, layer, "self_attn.g_proj").view(heads)
        y = norm.gated_rms_norm(o, self.w[p + "o_norm.weight"], gate, self.c.rms_norm_eps)
        return self.lin(y.flatten(1), layer, "self_attn.o_proj")

    def mla(self, x: Tensor, layer: int) -> Tensor:
        c, p, eps = self.c, f"model.layers.{layer}.self_attn.", self.c.mla_latent_norm_eps
        q = norm.rms_norm(self.lin(x, layer, "self_attn.q_a_proj"), self.w[p + "q_a_layernorm.weight"], eps)
        q = self.lin(q, layer, "self_attn.q_b_proj").view(self.batch, c.num_attention_heads, -1)
        kv = self.lin(x, layer, "self_attn.kv_a_proj_with_mqa")
        latent = norm.rms_norm(kv[:, : c.kv_lora_rank].contiguous(), self.w[p + "kv_a_layernorm.weight"], eps)
        page = self.table[:, self.position // mla.PAGE]
        self.pages[layer][page, self.position % mla.PAGE] = torch.cat([latent, kv[:, c.kv_lora_rank :]], 1)
        w = self.w[p + "kv_b_proj.weight"].view(c.num_attention_heads, -1, c.kv_lora_rank)
        w_uk, w_uv = w.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        q_lat = mla.head_matmul(q[..., : c.qk_nope_head_dim].contiguous(), w_uk.contiguous())
        lengths = torch.full((self.batch,), self.position + 1)
        o_lat = mla.absorbed(q_lat, q[..., c.qk_nope_head_dim :], self.pages[layer], self.table, lengths, c.mla_scale)
        o = mla.head_matmul(o_lat.to(x.dtype), w_uv.transpose(1, 2).contiguous()).flatten(1)
        return self.lin(o * sigmoid(self.lin(x, layer, "self_attn.g_proj")), layer, "self_attn.o_proj")

    def glu(self, x: Tensor, layer: int, prefix: str) -> Tensor:
        g, u = self.lin(x, layer, prefix + "gate_proj"), self.lin(x, layer, prefix + "up_proj")
        h = situ.situ_glu(g, u, self.c.activation_situ_beta, self.c.activation_situ_linear_beta)
        return self.lin(h, layer, prefix + "down_proj")

    def moe(self, x: Tensor, layer: int) -> Tensor:
        c, p = self.c, f"model.layers.{layer}.block_sparse_moe."
        ids, weights = moe.route(x, self.w[p + "gate.weight"], self.w[p + "gate.e_score_correction_bias"],
                                 c.num_experts_per_token, c.moe_renormalize, c.routed_scaling_factor)
        z = self.lin(x, layer, "block_sparse_moe.routed_expert_down_proj")
        act = situ.GluAct(c.activation_situ_beta, c.activation_situ_linear_beta)
        stacks = (self.w[p + f"experts.{n}"] for n in ("w1", "w3", "w2"))
        u = moe.experts(z, ids, weights, *stacks, act, self.adapters[layer].experts)
        u = self.norm(u, layer, "block_sparse_moe.routed_expert_norm")
        y = self.lin(u, layer, "block_sparse_moe.routed_expert_up_proj")
        return y + self.glu(x, layer, "block_sparse_moe.shared_experts.")

    def step(self, ids: Tensor) -> Tensor:
        c = self.c
        p, bank = self.w["model.embed_tokens.weight"][ids], []
        for layer in range(c.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            a = self.mix([*bank, p], prefix + "self_attention_res") if bank else p
            x = self.norm(a, layer, "input_layernorm")
            y = self.mla(x, layer) if layer in c.mla_layers else self.kda(x, layer)
            if layer % c.attn_res_block_size == 0:
                bank, p = [*bank, p], y
            else:
                p = p + y
            m = self.norm(self.mix([*bank, p], prefix + "mlp_res"), layer, "post_attention_layernorm")
            p = p + (self.moe(m, layer) if layer in c.moe_layers else self.glu(m, layer, "mlp."))
        self.position += 1
        h = norm.rms_norm(self.mix([*bank, p], "model.output_attn_res"), self.w["model.norm.weight"], c.rms_norm_eps)
        return linear.linear(h, self.w["lm_head.weight"])


def prepared(config_name: str) -> tuple[CausalLM, dict[str, Tensor], tuple[LayerAdapter, ...]]:
    model = CausalLM(tiny() if config_name == "tiny" else toy(96), seed=4)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("res_proj.weight"):
                x.normal_(0, 0.3)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    settings = lora.LoraConfig(rank=3, alpha=6.0)
    for p in lora.attach(model, settings, seed=1):
        p.data.add_(0.2 * torch.randn_like(p))
    return model, weights, adapter_layers(model.config.text_config, settings, lora.export_adapter(model, settings))


def test_token_by_token_equals_the_whole_forward() -> None:
    torch.manual_seed(0)
    for name in ("tiny", "toy"):
        model, weights, adapters = prepared(name)
        ids = torch.randint(1, 96, (3, 80))
        with torch.no_grad():
            want = model(ids)
            walk = Walk(model.config.text_config, weights, adapters, 3)
            got = torch.stack([walk.step(ids[:, t]) for t in range(80)], dim=1)
        # Over four seeds of the tiny model either is up to 1.1e-5, its log-probs up to 1.4e-4, from the fp64 run.
        assert (got - want).norm() / want.norm() < 2e-5
        assert (got.log_softmax(-1) - want.log_softmax(-1)).abs().max() < 2e-4


def test_a_sequence_alone_has_the_bits_it_has_among_others() -> None:
    torch.manual_seed(1)
    model, weights, adapters = prepared("tiny")
    ids = torch.randint(1, 96, (9, 70))
    with torch.no_grad():
        many = Walk(model.config.text_config, weights, adapters, 9)
        together = torch.stack([many.step(ids[:, t]) for t in range(70)], dim=1)
        one = Walk(model.config.text_config, weights, adapters, 1)
        alone = torch.stack([one.step(ids[4:5, t]) for t in range(70)], dim=1)
    assert torch.equal(together[4], alone[0])
    for layer, state in one.states.items():
        assert torch.equal(many.states[layer][4], state[0])
