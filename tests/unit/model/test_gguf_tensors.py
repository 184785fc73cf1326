"""The layout of MXFP4 blocks and the map of names, against hand-made bytes and the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kernels import mxfp4
from tidemill.model.config import ModelConfig
from tidemill.model.gguf.tensors import Mapped, codes_of, mapped_tensors, scales_of, to_blocks
from tidemill.model.inventory import inventory
from tidemill.model.presets import k3, kimi_linear_48b, tiny, tiny_linear


def test_a_block_by_hand() -> None:
    # Element i has code i mod 16: our bytes hold neighbours, ggml's hold elements 16 apart, low nibble first.
    packed = torch.tensor([[(2 * c + 1) % 16 << 4 | 2 * c % 16 for c in range(16)]], dtype=torch.uint8)
    packed[0, 15] = 0xA3
    block = to_blocks(packed, torch.tensor([[130]], dtype=torch.uint8))
    assert block.shape == (1, 1, 17)
    codes = [i % 16 for i in range(30)] + [0x3, 0xA]
    assert block[0, 0].tolist() == [130, *(codes[j] | codes[j + 16] << 4 for j in range(16))]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31))
def test_repacking_is_lossless(experts: int, rows: int, blocks: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (experts, rows, 16 * blocks), generator=gen).to(torch.uint8)
    scale = torch.randint(0, 256, (experts, rows, blocks), generator=gen).to(torch.uint8)
    blocks = to_blocks(packed, scale)
    assert torch.equal(codes_of(blocks), packed)
    assert torch.equal(scales_of(blocks), scale)


def test_the_gguf_package_decodes_the_same_values() -> None:
    sizes = torch.tensor([1e-6, 1.0, 3.0, 40.0, 1e5, 0.0])
    w = torch.randn(6, 96, generator=torch.Generator().manual_seed(2)) * sizes.unsqueeze(-1)
    packed, scale = mxfp4.encode(w)
    raw = to_blocks(packed, scale).flatten(1).numpy()
    values = dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(values, mxfp4.decode(packed, scale).numpy())


@pytest.mark.parametrize("config", [tiny(), tiny_linear(), k3(), kimi_linear_48b()])
def test_every_tensor_of_ours_goes_somewhere_and_nothing_twice(config: ModelConfig) -> None:
    c = config.text_config
    mapped = mapped_tensors(c)
    sources = [name for m in mapped.values() for name in m.sources]
    assert set(sources) == set(inventory(c))
    twice = {name for name in sources if sources.count(name) > 1} if len(sources) < 3000 else set()
    assert all(name.endswith("kv_b_proj.weight") for name in twice)


def test_the_released_model_has_the_names_and_shapes_of_llama_cpp() -> None:
    mapped = mapped_tensors(k3().text_config)

    def shape(name: str) -> tuple[int, ...]:
        m: Mapped = mapped[name]
        return m.shape

    # From llama.cpp 0c1e57098, src/models/kimi-k3.cpp (there with the axes reversed).
    assert shape("token_embd.weight") == shape("output.weight") == (163_840, 7168)
    assert shape("output_norm.weight") == shape("output_res_score.weight") == (7168,)
    assert shape("blk.0.attn_res_score.weight") == shape("blk.92.ffn_res_score.weight") == (7168,)
    assert shape("blk.0.ssm_conv1d_q.weight") == (1, 12_288, 1, 4)
    assert shape("blk.0.ssm_a") == (96,)
    assert shape("blk.0.ssm_dt.bias") == (12_288,)
    assert shape("blk.0.ssm_g.weight") == (12_288, 7168)
    assert shape("blk.0.ffn_gate.weight") == (33_792, 7168)
    assert shape("blk.3.attn_gate.weight") == (12_288, 7168)
    assert shape("blk.3.attn_k_b.weight") == (96, 512, 128)
    assert shape("blk.3.attn_v_b.weight") == (96, 128, 512)
    assert shape("blk.3.ffn_gate_exps.weight") == shape("blk.3.ffn_up_exps.weight") == (896, 3072, 3584)
    assert shape("blk.3.ffn_down_exps.weight") == (896, 3584, 3072)
    assert shape("blk.3.exp_probs_b.bias") == (896,)
    assert shape("blk.3.ffn_routed_norm.weight") == (3584,)
    assert "blk.3.ssm_g.weight" not in mapped
    assert "blk.0.attn_gate.weight" not in mapped
    linear = mapped_tensors(kimi_linear_48b().text_config)
    assert linear["blk.0.ssm_a"].shape == (32, 1)
    assert linear["blk.0.ssm_g_a.weight"].shape == (128, 2304)
    assert linear["blk.3.attn_q.weight"].shape == (6144, 2304)
    assert not any("res_score" in name or "routed" in name for name in linear)
