"""Batch layout against a plain loop over tokens, and sampling that looks at nothing but its own row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.engine_api import SamplingParams
from tidemill.engine.batch import build_batch
from tidemill.engine.request import Request, Sequence
from tidemill.engine.sampling import Sampler

NUM_SLOTS, PAGES = 12, 4


@st.composite
def steps(draw):
    slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=8, unique=True))
    longest = draw(st.sampled_from([1, 5, 40]))
    return [(slot, draw(st.integers(0, 150)), draw(st.integers(1, longest))) for slot in slots]


@given(steps())
def test_layout_says_what_a_loop_says(step):
    slots, starts, counts = (np.array(column, dtype=np.int64) for column in zip(*step, strict=True))
    tokens = np.arange(counts.sum()) + 100
    table = np.random.default_rng(0).permutation(NUM_SLOTS * PAGES).reshape(NUM_SLOTS, PAGES)
    batch = build_batch(slots, starts, counts, tokens, table)
    total, first = int(counts.sum()), np.cumsum(counts) - counts
    assert batch.num_rows == total
    assert len(batch.token_ids) % 16 == 0
    assert sorted(batch.order) == list(range(len(slots)))
    assert list(batch.counts) == sorted(counts, reverse=True)
    seen = set()
    for i, origin in enumerate(batch.order):
        assert batch.slots[i] == slots[origin]
        for j in range(counts[origin]):
            row = int(batch.rows_of(np.array([i]), np.array([j]))[0])
            seen.add(row)
            position = starts[origin] + j
            assert batch.token_ids[row] == tokens[first[origin] + j]
            assert batch.positions[row] == position
            assert batch.row_sequence[row] == i
            assert batch.latent_rows[row] == table[slots[origin], position // 64] * 64 + position % 64
            assert batch.offsets[j] <= row < batch.offsets[j] + batch.active[j]
            if batch.taps is not None:
                taps = [known(batch, i, j + back) for back in (-3, -2, -1, 0)]
                assert batch.taps[row].tolist() == taps
        if batch.carry is not None:
            assert batch.carry[i].tolist() == [known(batch, i, int(counts[origin]) + back) for back in (-3, -2, -1)]
    assert seen == set(range(total))
    assert (batch.taps is None) == (max(counts) == 1)
    consecutive = batch.slots.tolist() == list(range(batch.slots[0], batch.slots[0] + len(slots)))
    assert (batch.slot_range is not None) == consecutive


def known(batch, i: int, j: int) -> int:
    """Row of token j of sequence i in [carried; new]."""
    if j < 0:
        return 3 * i + 3 + j
    return 3 * batch.num_sequences + int(batch.rows_of(np.array([i]), np.array([j]))[0])


def request(**params) -> Request:
    sampling = SamplingParams(**({"max_tokens": 9, "seed": 5} | params))
    return Request(request_id="r", call_id=1, sequence=Sequence(key="s"), sampling=sampling, stream=False, start=0,
                   prompt_end=1)


VARIANTS = ({}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.6}, {"top_k": 3}, {"min_p": 0.2},
            {"logit_bias": ((4, 3.0),)}, {"frequency_penalty": 1.0}, {"top_logprobs": 2},
            {"min_tokens": 3, "stop_token_ids": (2, 9)}, {"seed": -1, "sequence": 1 << 63})


def test_a_row_is_sampled_alike_alone_and_among_others():
    sampler = Sampler(len(VARIANTS), 32)
    requests = [request(**v) for v in VARIANTS]
    for r in requests:
        r.counts = {3: 2, 7: 1} if r.sampling.frequency_penalty else {}
    logits = torch.randn(len(VARIANTS), 32, generator=torch.Generator().manual_seed(1)) * 3
    slots = np.arange(len(VARIANTS))
    for slot, r in enumerate(requests):
        sampler.admit(slot, r.sampling)
    for position in range(40):
        positions = np.full(len(VARIANTS), position)
        together = sampler.draw(logits, requests, slots, positions)
        for i, r in enumerate(requests):
            alone = sampler.draw(logits[i : i + 1], [r], slots[i : i + 1], positions[:1])
            assert (alone.ids[0], alone.logprobs[0], alone.model_logprobs[0]) == (
                together.ids[i], together.logprobs[i], together.model_logprobs[i])
            assert alone.top.get(0) == together.top.get(i)


def test_seed_sequence_and_position_each_change_the_draw():
    sampler = Sampler(1, 64)
    logits = torch.zeros(1, 64)

    def draws(**params) -> list[int]:
        r = request(**params)
        sampler.admit(0, r.sampling)
        return [sampler.draw(logits, [r], np.zeros(1, dtype=np.int64), np.array([p])).ids[0] for p in range(30)]

    base = draws(seed=1, sequence=2)
    assert base == draws(seed=1, sequence=2)
    assert len(set(base)) > 15
    assert base != draws(seed=2, sequence=2)
    assert base != draws(seed=1, sequence=3)
    assert draws(seed=-1) == draws(seed=(1 << 64) - 1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_fails_alone(bad):
    sampler = Sampler(2, 16)
    requests = [request(), request()]
    for slot, r in enumerate(requests):
        sampler.admit(slot, r.sampling)
    logits = torch.randn(2, 16)
    good = sampler.draw(logits, requests, np.arange(2), np.array([5, 5]))
    logits[0, 3] = bad
    drawn = sampler.draw(logits, requests, np.arange(2), np.array([5, 5]))
    assert drawn.failed == [True, False]
    assert (drawn.ids[1], drawn.logprobs[1]) == (good.ids[1], good.logprobs[1])


def test_penalties_follow_openais_rule():
    r = request(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.25)
    r.counts = {1: 2}
    sampler = Sampler(1, 4)
    sampler.admit(0, r.sampling)
    for margin, expected in ((1.2, 0), (1.3, 1)):
        logits = torch.tensor([[0.0, margin, -9.0, -9.0]])
        assert sampler.draw(logits, [r], np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)).ids == [expected]
