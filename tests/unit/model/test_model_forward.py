"""Behaviour of the model and its layers: initialisation, padding, selection, residual bank, balancing, quantisation."""

from __future__ import annotations

import pytest
import torch

from tidemill.core.config import replace
from tidemill.core.errors import ConfigError, InputError
from tidemill.kernels import mxfp4, mxfp8
from tidemill.model.balance import RouterBalance
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import ModelConfig
from tidemill.model.inventory import inventory
from tidemill.model.layers import DecoderLayer, LatentMoE
from tidemill.model.presets import tiny, toy
from tidemill.model.quant import fake_quant
from tidemill.parallel import ParallelContext, SoloGroup, share, single


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return CausalLM(tiny(), seed=3)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, 96, (3, 33), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("config", [tiny(), toy(64), tiny(dtype="bfloat16")])
def test_state_dict_is_the_inventory(config: ModelConfig) -> None:
    state = CausalLM(config).state_dict()
    want = {name: (spec.shape, f"torch.{spec.dtype}") for name, spec in inventory(config.text_config).items()}
    assert {name: (tuple(x.shape), str(x.dtype)) for name, x in state.items()} == want


def test_every_parameter_is_initialised_on_purpose() -> None:
    one, same, other = (CausalLM(tiny(), seed=s).state_dict() for s in (1, 1, 2))
    text = tiny().text_config
    for name, x in one.items():
        assert torch.equal(x, same[name])
        assert x.isfinite().all()
        if name.endswith(("norm.weight", "layernorm.weight")):
            assert x.eq(1).all()
        elif name.endswith(("A_log", "res_proj.weight", "correction_bias")):
            assert x.eq(0).all()
        else:
            assert not torch.equal(x, other[name]), name
    assert one["model.embed_tokens.weight"][0].eq(0).all()
    assert one["lm_head.weight"].std().item() == pytest.approx(text.initializer_range, rel=0.1)
    prefix = "model.layers.1."
    gate = one[prefix + "block_sparse_moe.gate.weight"]
    assert 0.9 * text.hidden_size**-0.5 < gate.abs().max() <= text.hidden_size**-0.5
    conv = one[prefix + "self_attn.q_conv1d.weight"]
    assert 0.4 < conv.abs().max() <= 0.5
    step = torch.nn.functional.softplus(one[prefix + "self_attn.dt_bias"])
    assert 1e-3 * 0.99 <= step.min() < step.max() <= 1e-1 * 1.01


def test_right_padding_changes_nothing_before_it(model: CausalLM, ids: torch.Tensor) -> None:
    with torch.no_grad():
        whole = model(ids)
        shorter = ids.clone()
        shorter[:, 20:] = 0
        torch.testing.assert_close(model(shorter)[:, :20], whole[:, :20], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(ids[:, :20]), whole[:, :20], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(ids[1:2]), whole[1:2], rtol=1e-4, atol=1e-5)


def test_selected_positions_equal_the_whole_and_so_do_their_gradients(model: CausalLM, ids: torch.Tensor) -> None:
    select = torch.tensor([0, 5, 40, 98])
    picked, whole = model(ids, select=select), model(ids).flatten(0, 1)[select]
    torch.testing.assert_close(picked, whole, rtol=1e-4, atol=1e-5)
    names = ("embed_tokens.weight", "layers.6.block_sparse_moe.experts.w1", "layers.0.mlp.up_proj.weight")
    params = [dict(model.model.named_parameters())[n] for n in names]
    weight = torch.randn(picked.shape, generator=torch.Generator().manual_seed(4))
    for a, b in zip(torch.autograd.grad((picked * weight).sum(), params),
                    torch.autograd.grad((whole * weight).sum(), params), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_every_parameter_gets_a_gradient_but_the_unused_first_mixture(ids: torch.Tensor) -> None:
    model = CausalLM(tiny(), seed=1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("res_proj.weight"):
                p.normal_()
    model(ids).logsumexp(-1).mean().backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert idle == {"model.layers.0.self_attention_res_norm.weight", "model.layers.0.self_attention_res_proj.weight"}


def test_bank_holds_the_embedding_and_finished_blocks(model: CausalLM, ids: torch.Tensor) -> None:
    """Spy on what every mixture reads: sizes follow the block rule, row 0 is the embedding, rows never change."""
    seen: list[tuple[int, list[torch.Tensor], torch.Tensor]] = []
    originals = {}
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        originals[layer.index] = layer.feed_forward

        def spy(bank, p, layer=layer):
            seen.append((layer.index, list(bank), p))
            return originals[layer.index](bank, p)

        layer.feed_forward = spy  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            model(ids)
    finally:
        for layer in model.model.layers:
            del layer.feed_forward
    assert [len(bank) for _, bank, _ in seen] == [1, 1, 1, 2, 2, 2, 3]
    embedding = torch.nn.functional.embedding(ids, model.model.embed_tokens.weight)
    for _, bank, _ in seen:
        assert torch.equal(bank[0], embedding)
    assert torch.equal(seen[3][1][1], seen[6][1][1])


def test_bad_ids(model: CausalLM) -> None:
    with pytest.raises(InputError, match="int64"):
        model(torch.zeros(2, 3))
    with pytest.raises(InputError, match=r"0\.\.95"):
        model(torch.tensor([[96]]))
    with pytest.raises(InputError, match=r"\[B, T\]"):
        model(torch.tensor([1]))


def test_quantile_balancing_moves_only_the_bias_and_ignores_padding(ids: torch.Tensor) -> None:
    model = CausalLM(tiny(), seed=1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 25:] = False
    biases = []
    for padding in (0, 7):
        filled = ids.masked_fill(~mask, padding)
        balance = RouterBalance(model)
        for b in range(3):
            balance.mask = mask[b : b + 1]
            with torch.no_grad():
                model(filled[b : b + 1], observer=balance)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        balance.apply()
        after = model.state_dict()
        changed = {k for k in after if not torch.equal(after[k], before[k])}
        assert changed == {k for k in after if k.endswith("e_score_correction_bias")}
        biases.append({k: after[k].clone() for k in changed})
        model.load_state_dict(before)
    for name, bias in biases[0].items():
        assert torch.equal(bias, biases[1][name])
        assert abs(bias.mean().item()) < 1e-6


def test_the_latent_norm_follows_the_combination() -> None:
    """With the norm behind the sum, a common factor of the experts' outputs vanishes (once eps is small)."""
    moe = CausalLM(tiny(), seed=1).model.layers[1].block_sparse_moe
    assert isinstance(moe, LatentMoE)
    x = torch.randn(4, 48)
    moe.experts.w2.data.mul_(1000.0)
    y, scores = moe(x)
    moe.experts.w2.data.mul_(8.0)
    scaled, _ = moe(x)
    torch.testing.assert_close(scaled, y, rtol=1e-4, atol=1e-4)
    assert scores.shape == (4, 8)


def test_fake_quantisation_computes_on_stored_values_and_passes_gradients(ids: torch.Tensor) -> None:
    model, stored = CausalLM(tiny(), seed=1), CausalLM(tiny(), seed=1)
    with torch.no_grad():
        for name, p in stored.named_parameters():
            if ".experts.w" in name:
                p.copy_(mxfp4.decode(*mxfp4.encode(p)))
    plain = model(ids)
    model.set_quantization("weights")
    quantised = model(ids)
    assert torch.equal(quantised, stored(ids))
    assert not torch.equal(quantised, plain)
    w = torch.randn(3, 32, requires_grad=True)
    (fake_quant(w) * torch.arange(96.0).view(3, 32)).sum().backward()
    assert torch.equal(w.grad, torch.arange(96.0).view(3, 32))


def test_the_k3_scheme_rounds_weights_and_activations(ids: torch.Tensor) -> None:
    model, stored = CausalLM(tiny(), seed=1), CausalLM(tiny(), seed=1)
    with torch.no_grad():
        for name, p in stored.named_parameters():
            if ".experts.w" in name:
                p.copy_(mxfp4.decode(*mxfp4.encode(p)))
    model.set_quantization("weights")
    weights_only = model(ids)
    model.set_quantization("weights+activations")
    got = model(ids)
    assert not torch.equal(got, weights_only)
    experts, rounding = stored.model.layers[1].block_sparse_moe.experts, model.model.layers[1].block_sparse_moe.experts
    z, choice, share = torch.randn(9, experts.w1.shape[2]), torch.tensor([[3]]).expand(9, 1), torch.ones(9, 1)
    zq = mxfp8.round_trip(z)
    h = mxfp8.round_trip(experts.act.train(zq @ experts.w1[3].t(), zq @ experts.w3[3].t()))
    torch.testing.assert_close(rounding(z, choice, share), h @ experts.w2[3].t(), rtol=1e-5, atol=1e-7)
    got.square().mean().backward()
    for p in (rounding.w1, rounding.w2, rounding.w3):
        assert p.grad is not None
        assert p.grad.any()
    model.set_quantization("none")
    assert torch.equal(model(ids), CausalLM(tiny(), seed=1)(ids))


def test_quantisation_refuses_what_it_cannot_do() -> None:
    model = CausalLM(tiny(), initialise=False)
    with pytest.raises(InputError, match="expected one of none, weights, weights\\+activations"):
        model.set_quantization("mxfp8")  # type: ignore[arg-type]
    text = replace(tiny().text_config, quantize_experts=False, routed_expert_hidden_size=24)
    narrow = CausalLM(replace(tiny(), text_config=text), initialise=False)
    narrow.set_quantization("none")
    for value in ("weights", "weights+activations"):
        with pytest.raises(InputError, match=r"routed_expert_hidden_size = 24: .* multiple of 32\. Use 32, or"):
            narrow.set_quantization(value)


class TestParallel:
    def test_one_process_is_the_trivial_case(self) -> None:
        context, x = single(), torch.randn(3)
        assert (context.rank, context.world_size) == (0, 1)
        assert context.tensor.all_reduce(x) is x
        assert context.tensor.all_gather(x, 0) is x
        assert context.expert.broadcast(x, 0) is x

    def test_layers_take_their_share_and_refuse_a_remainder(self) -> None:
        pair = SoloGroup(rank=0, size=2)
        assert share(8, pair, what="num_experts") == 4
        context = ParallelContext(tensor=SoloGroup(), expert=pair)
        model = CausalLM(tiny(), context, initialise=False)
        assert model.model.layers[1].block_sparse_moe.experts.w1.shape[0] == 4
        with pytest.raises(ConfigError, match="multiple of the group size 2"):
            CausalLM(tiny(), ParallelContext(tensor=pair, expert=SoloGroup()), initialise=False)
