"""Our logits against llama.cpp's, on exported random models: training form and engine form, F32 and MXFP4 experts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from oracles import (
    LLAMA_BINDINGS,
    Suite,
    argmax_disagreements,
    k3_config,
    linear_config,
    lively,
    median_row,
    peer,
    random_ids,
    relative,
)
from torch import Tensor

from tidemill.core.config import replace
from tidemill.core.engine_api import GenerateRequest, SamplingParams
from tidemill.engine import messages
from tidemill.engine.batch import Batch
from tidemill.engine.config import EngineConfig
from tidemill.engine.core import EngineCore
from tidemill.engine.weights import EngineWeights
from tidemill.kernels import kda
from tidemill.kernels.norm import l2_norm, l2_norm_train
from tidemill.kernels.situ import GluAct
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import ModelConfig
from tidemill.model.gguf import DenseKind, export_gguf
from tidemill.model.layers import kda as kda_layer
from tidemill.model.layers import moe as moe_layer

POSITIONS = 2048
LIMIT = 1e-5
EPS = 1e-5
"""llama.cpp has one eps for everything. Ours for the length of q and k is 1e-6, as in the reference; it is set here."""
QUANTIZED_LIMIT, DEEP_LIMIT = 1e-3, 0.1
UNTOUCHED = 24
"""Rows of the deep case before the first one in which a last bit decides a rounding to 8 bits differently."""
_FLIPS = "from the row on where a last bit first decides a rounding to 8 bits, later rows read what differs"


def main() -> bool:
    suite = Suite("llamacpp", {"llama-cpp-python": LLAMA_BINDINGS.name.rpartition("-")[2]})
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        _whole_models(suite, work)
        _variants(suite, work)
        _faults(suite, work)
        _quantized(suite, work)
        _dense_bf16(suite, work)
    return suite.write()


def _whole_models(suite: Suite, work: Path) -> None:
    for name, config in (("K3, 8 layers", k3_config()), ("Kimi Linear, 8 layers", linear_config())):
        model = lively(config)
        ids = random_ids(config.text_config.vocab_size, POSITIONS)
        theirs = _llama(work, model, ids)
        forms = {"training form": _ours(model, ids), "engine form": _engine(work, model, ids)}
        exact = _ours(model.double(), ids)
        for form, ours in forms.items():
            case = f"{name}, F32, {POSITIONS} positions, {form}"
            suite.add(case, "relative L2", relative(ours, theirs), LIMIT)
            suite.add(case, "argmax differs where the gap decides", argmax_disagreements(ours, theirs), 0)
        suite.add(f"{name}, llama.cpp against our fp64", "relative L2", relative(theirs, exact), LIMIT)
        suite.add(f"{name}, one token a call against {POSITIONS // 4} at a time", "relative L2",
                  relative(_llama(work, model.float(), ids[:256], chunk=1), theirs[:256]), LIMIT)


def _variants(suite: Suite, work: Path) -> None:
    configs = {
        "7 layers": k3_config(layers=7, full=(4, 7)), "9 layers": k3_config(layers=9, full=(4, 8)),
        "blocks of 1": k3_config(attn_res_block_size=1), "blocks of 5": k3_config(attn_res_block_size=5),
        "one block of 8": k3_config(attn_res_block_size=8),
        "no attention residuals": k3_config(attn_res_block_size=None),
        "top 6": k3_config(num_experts_per_token=6), "plain q_proj": k3_config(q_lora_rank=None),
        "no latent norm": k3_config(latent_moe_use_norm=False),
        "no latent norm, scale 2.5": k3_config(latent_moe_use_norm=False, routed_scaling_factor=2.5),
        "head width 128": k3_config(heads=(2, 128)), "no MLA gate": k3_config(mla_use_output_gate=False),
        "MLA first": k3_config(full=(1, 5)), "all dense": k3_config(first_k_dense_replace=8),
        "one shared expert": k3_config(num_shared_experts=1),
    }
    for name, config in configs.items():
        model = lively(config, seed=2)
        ids = random_ids(config.text_config.vocab_size, 256)
        error = relative(_ours(model, ids), _llama(work, model, ids))
        suite.add(f"K3, {name}, F32, 256 positions", "relative L2", error, LIMIT)


def _faults(suite: Suite, work: Path) -> None:
    """Planted faults: each wrong formula must be seen by the same comparison, or the comparison is worth nothing."""
    model = lively(k3_config(), seed=3)
    ids = random_ids(model.config.text_config.vocab_size, 256)
    theirs = _llama(work, model, ids)
    for name, broken in _broken(model).items():
        suite.add(f"planted fault: {name}", "relative L2", relative(_ours(broken, ids), theirs), 0.05, at_least=True)


def _broken(model: CausalLM) -> dict[str, CausalLM]:
    """Copies with one formula wrong each, by configuration or by what the weights mean."""
    text = model.config.text_config

    def copy(change: Callable[[str, Tensor], Tensor] = lambda _, x: x, **fields: object) -> CausalLM:
        config = ModelConfig(text_config=replace(text, **fields))
        other = CausalLM(config, initialise=False).requires_grad_(False)
        names = set(other.state_dict())
        other.load_state_dict({k: change(k, v.clone()) for k, v in model.state_dict().items() if k in names})
        return other

    def only(end: str, change: Callable[[Tensor], Tensor]) -> CausalLM:
        return copy(lambda name, x: change(x) if name.endswith(end) else x)

    dims = (text.qk_nope_head_dim, text.v_head_dim)
    linear = text.linear_attn_config
    return {
        "unbounded decay (softplus)": copy(linear_attn_config=replace(
            linear, gate_lower_bound=None, a_log_size=linear.stored_a_log)),
        "decay rate left out": only("A_log", torch.zeros_like),
        "convolution taps reversed": only("conv1d.weight", lambda x: x.flip(-1)),
        "value before key in kv_b": only("kv_b_proj.weight", lambda x: torch.cat(
            x.view(text.num_attention_heads, sum(dims), -1).split(dims, 1)[::-1], 1).reshape(x.shape)),
        "pe before nope in q": only("q_b_proj.weight", lambda x: x.view(
            text.num_attention_heads, -1, x.shape[-1]).roll(text.qk_rope_head_dim, 1).reshape(x.shape)),
        "no MLA gate": copy(mla_use_output_gate=False),
        "residual blocks of 6": copy(attn_res_block_size=6),
        "gain of the mixture left out": only("res_norm.weight", torch.ones_like),
        "no selection bias": only("e_score_correction_bias", torch.zeros_like),
        "no latent norm": copy(latent_moe_use_norm=False),
        "no cap on the up branch": copy(activation_situ_linear_beta=None),
        "SwiGLU": copy(hidden_act="silu"),
        "gate and up exchanged": copy(lambda name, x: model.state_dict()[
            name.replace("experts.w1", "experts.w3")] if name.endswith("experts.w1") else x),
    }


def _quantized(suite: Suite, work: Path) -> None:
    """MXFP4 experts. llama.cpp rounds what each expert reads to 8 bits in blocks of 32, so that is done here too; the
    sharp random router flips choices on some rows, hence fewer layers and the median row."""
    for layers in (4, 8):
        config = k3_config(layers=layers, quantize_experts=True)
        folder = work / f"mxfp4-{layers}"
        write_base(folder, lively(config, seed=4))
        model = BaseStore.open(folder).model()
        ids = random_ids(config.text_config.vocab_size, 256)
        theirs = _llama(work, model, ids, folder=folder)
        plain = _ours(model, ids)
        with _replaced(moe_layer, "experts_train", _experts_on_rounded_inputs):
            rounded = _ours(model, ids)
        case = f"K3, {layers} layers, MXFP4 experts, 256 positions"
        rows = f"{case}, inputs of experts rounded as llama.cpp does"
        if layers == 4:
            suite.add(rows, "relative L2", relative(rounded, theirs), QUANTIZED_LIMIT)
            suite.add(rows, "median row", median_row(rounded, theirs), QUANTIZED_LIMIT)
        else:
            error = median_row(rounded[:UNTOUCHED], theirs[:UNTOUCHED])
            suite.add(rows, f"median of the first {UNTOUCHED} rows", error, QUANTIZED_LIMIT)
            suite.add(rows, "relative L2", relative(rounded, theirs), DEEP_LIMIT, note=_FLIPS)
        suite.add(f"{case}, inputs not rounded", "median row", median_row(plain, theirs), 0.2,
                  note="what llama.cpp's rounding costs on a random model")


def _dense_bf16(suite: Suite, work: Path) -> None:
    """The smallest file: BF16 matrices and packed experts. llama.cpp rounds what each matrix reads to bf16."""
    config = k3_config(layers=4, quantize_experts=True)
    write_base(work / "bf16", lively(config, seed=4))
    ids = random_ids(config.text_config.vocab_size, 256)
    theirs = _llama(work, BaseStore.open(work / "bf16").model(), ids, folder=work / "bf16", dense="bf16")
    ours = _ours(BaseStore.open(work / "bf16").model(), ids)
    suite.add("K3, 4 layers, BF16 matrices, MXFP4 experts, 256 positions", "median row", median_row(ours, theirs), 0.1,
              note="nothing rounded here: what such a file costs on a random model")


def _round_to_q8(x: Tensor) -> Tensor:
    """Blocks of 32 as 8-bit integers times amax/127 kept in fp16; the integers are round(x · (127/amax))."""
    blocks = x.float().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(amax > 0, 127 / amax, torch.zeros_like(amax))
    return ((blocks * inverse).round() * (amax / 127).half().float()).flatten(-2)


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _experts_on_rounded_inputs(z: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
                               act: GluAct, lora: None = None, *, mxfp8_inputs: bool = False) -> Tensor:
    """Routed experts one by one, with everything they multiply rounded to 8 bits first."""
    assert lora is None
    assert not mxfp8_inputs
    out = torch.zeros_like(z)
    for expert in range(len(w1)):
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        x = _round_to_q8(z[rows])
        h = act.train(x @ w1[expert].T, x @ w3[expert].T)
        out.index_add_(0, rows, weights[rows, choice].unsqueeze(-1) * (_round_to_q8(h) @ w2[expert].T))
    return out


@torch.no_grad()
def _ours(model: CausalLM, ids: Tensor) -> Tensor:
    with _replaced(kda_layer, "l2_norm_train", partial(l2_norm_train, eps=EPS)):
        return model(ids.unsqueeze(0))[0]


def _engine(work: Path, model: CausalLM, ids: Tensor) -> Tensor:
    """Logits of every position from the serving engine's own forward."""
    folder = work / "engine"
    write_base(folder, model)
    core = EngineCore(EngineWeights(BaseStore.open(folder), name="oracle"), EngineConfig(
        max_model_len=len(ids) + 64, max_running=2, max_batched_tokens=256, prefill_chunk=256, pool_bytes=1 << 28))
    out = torch.empty(len(ids), model.config.text_config.vocab_size)
    forward = core.runner.forward

    def recording(batch: Batch, adapter: object) -> Tensor:
        hidden = forward(batch, adapter)
        out[batch.positions[: batch.num_rows]] = core.runner.logits(hidden, torch.arange(batch.num_rows))
        return hidden

    core.runner.forward = recording

    def qk_norm(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return l2_norm(q, EPS).mul_(q.shape[-1] ** -0.5), l2_norm(k, EPS)

    request = GenerateRequest(request_id="r", ids=tuple(ids.tolist()), session_id=None, prompt_logprobs=False,
                              sampling=SamplingParams(max_tokens=1, temperature=1.0, seed=1))
    core.submit(messages.Generate(1, request, False))
    with _replaced(kda, "qk_norm", qk_norm):
        while core.has_work:
            core.step()
    return out


def _llama(work: Path, model: CausalLM, ids: Tensor, *, chunk: int = 512, folder: Path | None = None,
           dense: DenseKind = "f32") -> Tensor:
    if folder is None:
        folder = work / "exported"
        write_base(folder, model)
    path = work / "model.gguf"
    export_gguf(folder, path, dense=dense, tokenizer=False)
    np.save(work / "ids.npy", ids.numpy().astype(np.int32))
    peer("llamacpp", "logits", path, work / "ids.npy", work / "logits.npy", str(chunk))
    return torch.from_numpy(np.load(work / "logits.npy"))


if __name__ == "__main__":
    raise SystemExit(not main())
