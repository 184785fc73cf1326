"""Going on from a past equals recomputing the whole, however the tokens come."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels.conv import halo, short_conv_train
from tidemill.model.causal_lm import CausalLM
from tidemill.model.layers import Linear
from tidemill.model.past import Past
from tidemill.model.presets import tiny, tiny_linear

LENGTHS = (150, 7, 66)


@pytest.fixture(scope="module", params=["k3", "linear"])
def model(request: pytest.FixtureRequest) -> CausalLM:
    model = CausalLM(tiny() if request.param == "k3" else tiny_linear(), seed=2)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("res_proj.weight"):
                x.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def texts(model: CausalLM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, model.config.text_config.vocab_size, (n,), generator=generator) for n in LENGTHS]


def alone(model: CausalLM, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids.unsqueeze(0))[0]


def walk(model: CausalLM, texts: list[Tensor], pieces: list[tuple[int, ...]]) -> list[Tensor]:
    """Logits of every text, with pieces[i][b] tokens of text b in step i."""
    past, out = Past(model.config.text_config, len(texts)), [[] for _ in texts]
    done = [0] * len(texts)
    for counts in pieces:
        new = [text[d : d + n] for text, d, n in zip(texts, done, counts, strict=True)]
        logits = model.go_on(torch.cat(new), torch.tensor(counts), past)
        for b, part in enumerate(logits.split(list(counts))):
            out[b].append(part)
        done = [d + n for d, n in zip(done, counts, strict=True)]
    assert past.lengths.tolist() == done
    return [torch.cat(parts) for parts in out]


@pytest.mark.parametrize("pieces", [
    [LENGTHS],
    [(100, 2, 64), (50, 5, 2)],
    [(1, 1, 1), (2, 1, 63), (64, 3, 1), (83, 2, 1)],
    [(150, 0, 0), (0, 7, 1), (0, 0, 65)],
    [(147, 4, 63), (1, 1, 1), (1, 1, 1), (1, 1, 1)],
])
def test_tokens_may_come_in_any_pieces(model: CausalLM, texts: list[Tensor], pieces: list[tuple[int, ...]]) -> None:
    for got, text in zip(walk(model, texts, pieces), texts, strict=True):
        want = alone(model, text)
        assert (got - want).norm() <= 2e-5 * want.norm()


def test_chosen_places_only(model: CausalLM, texts: list[Tensor]) -> None:
    want = walk(model, texts, [LENGTHS])
    places = torch.tensor([149, 156, 222])
    past = Past(model.config.text_config, 3)
    got = model.go_on(torch.cat(texts), torch.tensor(LENGTHS), past, select=places)
    torch.testing.assert_close(got, torch.stack([w[-1] for w in want]), rtol=1e-4, atol=1e-5)


def test_sequences_can_be_reordered_and_doubled(model: CausalLM, texts: list[Tensor]) -> None:
    past = Past(model.config.text_config, 3)
    model.go_on(torch.cat(texts), torch.tensor(LENGTHS), past)
    past.select(torch.tensor([2, 0, 2]))
    last = torch.tensor([3, 9, 4])
    got = model.go_on(last, torch.ones(3, dtype=torch.int64), past)
    for row, source, token in zip(got, (2, 0, 2), last, strict=True):
        want = alone(model, torch.cat([texts[source], token.unsqueeze(0)]))[-1]
        assert (row - want).norm() <= 2e-5 * want.norm()


def test_what_does_not_fit_is_refused_and_leaves_the_past_as_it_was(model: CausalLM, texts: list[Tensor]) -> None:
    past = Past(model.config.text_config, 2)
    model.go_on(torch.cat(texts[:2]), torch.tensor(LENGTHS[:2]), past)
    limit = model.config.text_config.max_position_embeddings
    for ids, counts, message in (
        (torch.tensor([1]), torch.tensor([1]), "1 sequences go on from a past of 2"),
        (torch.tensor([1]), torch.tensor([0, 0]), "no sequence has a new token"),
        (torch.tensor([1]), torch.tensor([1, 1]), "input_ids holds 1 tokens, counts 2"),
        (torch.zeros(limit, dtype=torch.int64), torch.tensor([limit, 0]), f"the model takes {limit} positions"),
        (torch.tensor([-1]), torch.tensor([1, 0]), "outside 0"),
    ):
        with pytest.raises(InputError, match=message):
            model.go_on(ids, counts, past)
    assert past.lengths.tolist() == list(LENGTHS[:2])
    want = alone(model, torch.cat([texts[0], torch.tensor([5])]))[-1]
    got = model.go_on(torch.tensor([5]), torch.tensor([1, 0]), past)[0]
    assert (got - want).norm() <= 2e-5 * want.norm()


def test_adapters_count_wherever_they_stand(model: CausalLM, texts: list[Tensor]) -> None:
    adapted = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for module in adapted.modules():
        if isinstance(module, Linear) and module is not adapted.lm_head:
            out, inputs = module.weight.shape
            a, b = torch.randn(2, inputs, generator=generator), torch.randn(out, 2, generator=generator)
            module.attach_lora(torch.nn.Parameter(a), torch.nn.Parameter(0.05 * b), 0.5)
    for got, text in zip(walk(adapted, texts, [(100, 2, 64), (49, 4, 1), (1, 1, 1)]), texts, strict=True):
        want = alone(adapted, text)
        assert (want - alone(model, text)).norm() > 1e-2 * want.norm()
        assert (got - want).norm() <= 5e-5 * want.norm()


def test_packed_convolutions_go_on_from_their_inputs() -> None:
    lengths, width = (1, 5, 2, 9), 3
    whole = [torch.randn(1, n + 4, width, dtype=torch.float64) for n in lengths]
    w = torch.randn(width, 4, dtype=torch.float64, requires_grad=True)
    want = torch.cat([short_conv_train(x, w)[0, 4:] for x in whole])
    state = torch.stack([x[0, 1:4] for x in whole]).requires_grad_()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    new = torch.cat([x[:, 4:] for x in whole], dim=1).requires_grad_()
    got = short_conv_train(new, w, state, cu_seqlens=bounds)
    torch.testing.assert_close(got[0], want)
    assert torch.autograd.gradcheck(lambda n, v, s: short_conv_train(n, v, s, cu_seqlens=bounds), (new, w, state))
    assert torch.equal(halo(new, state, cu_seqlens=bounds), torch.stack([x[0, -3:] for x in whole]))
    with pytest.raises(InputError, match=r"convolution state of shape \(3, 3, 3\): expected \(4, 3, 3\)"):
        short_conv_train(new, w, state[:3], cu_seqlens=bounds)
