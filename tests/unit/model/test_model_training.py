"""The model under training: packing, micro-batches and recomputation change neither loss nor gradients, only memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tidemill.core.config import replace
from tidemill.core.errors import InputError
from tidemill.model.balance import RouterBalance
from tidemill.model.causal_lm import CausalLM, Recompute
from tidemill.model.config import ModelConfig
from tidemill.model.presets import tiny, tiny_linear

FAMILIES = {"k3": tiny(), "kimi linear": tiny_linear()}
LENGTHS = (7, 20, 1, 33, 16)


def documents(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 96, (n,), generator=generator) for n in LENGTHS]


def gradients(model: CausalLM) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def packed_loss(model: CausalLM, docs: list[Tensor], total: int) -> float:
    """Next-token loss of documents packed into one row, summed over the tokens and divided by `total`; adds
    gradients."""
    cu_seqlens = torch.tensor([0, *(len(d) for d in docs)]).cumsum(0)
    ids = torch.cat(docs)
    logits = model(ids.unsqueeze(0), cu_seqlens=cu_seqlens)[0]
    predicts = torch.ones(len(ids), dtype=torch.bool)
    predicts[cu_seqlens[1:] - 1] = False
    loss = F.cross_entropy(logits[predicts], ids.roll(-1)[predicts], reduction="sum") / total
    if predicts.any():
        loss.backward()
    return float(loss.detach())


@contextmanager
def kept_bytes() -> Iterator[SimpleNamespace]:
    """Bytes of different tensors that autograd keeps for backward (parameters aside)."""
    found: dict[int, int] = {}
    result = SimpleNamespace(total=0)

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            storage = x.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield result
    result.total = sum(found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_and_micro_batches_change_nothing(family: str) -> None:
    model = CausalLM(FAMILIES[family], seed=1).double()
    docs = documents()
    total = sum(len(d) - 1 for d in docs)
    results: list[tuple[float, dict[str, Tensor]]] = []
    for groups in ([docs], [docs[:2], docs[2:]], [[d] for d in docs], [docs[::-1]]):
        model.zero_grad(set_to_none=True)
        loss = sum(packed_loss(model, group, total) for group in groups)
        results.append((loss, gradients(model)))
    # Rows padded on the right are the third way to the same numbers.
    model.zero_grad(set_to_none=True)
    ids = torch.nn.utils.rnn.pad_sequence(docs, batch_first=True)
    logits = model(ids)
    loss = torch.stack([F.cross_entropy(logits[i, : len(d) - 1], d[1:], reduction="sum")
                        for i, d in enumerate(docs) if len(d) > 1]).sum() / total
    loss.backward()
    results.append((float(loss.detach()), gradients(model)))
    first_loss, first = results[0]
    for other_loss, other in results[1:]:
        assert other_loss == pytest.approx(first_loss, rel=1e-12)
        assert other.keys() == first.keys()
        for name, want in first.items():
            assert (other[name] - want).norm() <= 1e-9 * want.norm() + 1e-15, name


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_changes_no_bit(family: str) -> None:
    docs, found = documents(), []
    modes: tuple[Recompute, ...] = ("none", "layer")
    for recompute in modes:
        model = CausalLM(FAMILIES[family], seed=1, recompute=recompute)
        balance = RouterBalance(model)
        ids = torch.cat(docs).unsqueeze(0)
        cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
        logits = model(ids, cu_seqlens=cu_seqlens, observer=balance)
        logits.logsumexp(-1).sum().backward()
        balance.apply()
        biases = {n: b.clone() for n, b in model.named_buffers()}
        found.append((logits.detach(), gradients(model), biases))
    (logits, grads, biases), (logits_again, grads_again, biases_again) = found
    assert torch.equal(logits, logits_again)
    assert all(torch.equal(grads[n], grads_again[n]) for n in grads)
    # A layer that runs twice is counted once: the biases moved alike.
    assert all(torch.equal(biases[n], biases_again[n]) for n in biases)
    assert any(bool(b.any()) for b in biases.values())


def test_recomputation_with_chosen_positions() -> None:
    ids = torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    select = torch.tensor([3, 19, 25])
    whole = CausalLM(tiny(), seed=2).double()
    lean = CausalLM(tiny(), seed=2, recompute="layer").double()
    want = whole(ids).flatten(0, 1)[select]
    got = lean(ids, select=select)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    got.sum().backward()
    want.sum().backward()
    for (name, a), (_, b) in zip(lean.named_parameters(), whole.named_parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-11, msg=name)


def test_recomputation_keeps_only_what_goes_between_layers() -> None:
    config = tiny()
    text = config.text_config
    ids = torch.randint(1, 96, (2, 256))
    kept: dict[str, int] = {}
    modes: tuple[Recompute, ...] = ("none", "layer")
    for recompute in modes:
        model = CausalLM(config, seed=1, recompute=recompute)
        with kept_bytes() as found:
            loss = model(ids).logsumexp(-1).sum()
        kept[recompute] = found.total
        loss.backward()
    stream = ids.numel() * text.hidden_size * 4
    head = ids.numel() * text.vocab_size * 4
    # One running sum a layer (the bank's rows are among them), the head's input and output, the final norm and mixture.
    assert kept["layer"] <= (text.num_hidden_layers + 4) * stream + 2 * head
    assert kept["layer"] < 0.25 * kept["none"]


def test_residual_mixtures_keep_references_only() -> None:
    """With and without attention residuals about the same is kept: a few numbers per token and site more."""
    ids = torch.randint(1, 96, (2, 128))
    kept: dict[int | None, int] = {}
    for block in (None, 3):
        config = ModelConfig(text_config=replace(tiny().text_config, attn_res_block_size=block))
        model = CausalLM(config, seed=1)
        with kept_bytes() as found:
            loss = model(ids).logsumexp(-1).sum()
        kept[block] = found.total
        del loss
    text = tiny().text_config
    stream = ids.numel() * text.hidden_size * 4
    # Each mixture is an output of its own, which the norm behind it keeps: two tensors a layer and one at the end.
    sites = 2 * text.num_hidden_layers + 1
    scalars = 3 * ids.numel() * (text.num_bank_rows + 1) * 4
    assert kept[3] - (kept[None] or 0) <= sites * (stream + scalars)


def test_one_batch_can_be_learnt_by_heart() -> None:
    model = CausalLM(tiny(), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    docs = documents()[:2]
    total = sum(len(d) - 1 for d in docs)
    for _ in range(40):
        optimizer.zero_grad(set_to_none=True)
        loss = packed_loss(model, docs, total)
        optimizer.step()
    assert loss < 0.1


def test_packed_rows_that_do_not_fit_are_refused() -> None:
    model = CausalLM(tiny())
    with pytest.raises(InputError, match="cu_seqlens"):
        model(torch.ones(1, 8, dtype=torch.int64), cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(InputError, match="batch of 2"):
        model(torch.ones(2, 8, dtype=torch.int64), cu_seqlens=torch.tensor([0, 8]))
