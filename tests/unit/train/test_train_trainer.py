"""The update: micro-batch invariance, learning, skipped steps, scoring, state."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from tidemill.core.errors import TrainError
from tidemill.model import presets
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.lora import LoraConfig
from tidemill.train.config import RlSection
from tidemill.train.samples import MAX_STRETCH, Sample, micro_batches
from tidemill.train.trainer import StepOutcome, Trainer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> BaseStore:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("base")
    write_base(folder, CausalLM(presets.tiny(), seed=1))
    return BaseStore.open(folder)


def samples(n: int = 9, seed: int = 0) -> list[Sample]:
    g = torch.Generator().manual_seed(seed)
    out = []
    for i in range(n):
        length = int(torch.randint(5, 30, (1,), generator=g))
        ids = torch.randint(0, 96, (length,), generator=g).tolist()
        sampled = [False, *(torch.rand(length - 1, generator=g) > 0.5).tolist()]
        logprobs = [-4.5 if s else 0.0 for s in sampled]
        out.append(Sample(tuple(ids), tuple(sampled), tuple(logprobs), 1.0 if i % 2 else -0.5))
    return out


def make(store: BaseStore, **changes: object) -> Trainer:
    rl = dataclasses.replace(RlSection(tis_cap=0.0), **changes)
    return Trainer(store, LoraConfig(rank=4, alpha=8.0), rl, seed=3, max_sampled=48)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-const"])
def test_gradient_does_not_depend_on_micro_batches(store: BaseStore, aggregation: str) -> None:
    grads = []
    for tokens in (16, 64, 100_000):
        trainer = make(store, aggregation=aggregation, micro_batch_tokens=tokens, grad_clip=1e9, lr=1e-12)
        report = trainer.step(samples())
        grads.append((torch.cat([p.grad.flatten() for p in trainer.parameters if p.grad is not None]), report.loss))
    for grad, loss in grads[1:]:
        torch.testing.assert_close(grad, grads[0][0], rtol=1e-5, atol=1e-6)
        assert loss == pytest.approx(grads[0][1], abs=1e-6)
    assert grads[0][0].abs().max() > 0


def test_micro_batches_keep_every_sample_once_and_bound_padding() -> None:
    data = samples(40)
    seen: list[int] = []
    for batch in micro_batches(data, max_tokens=100):
        lengths = [len(data[i].ids) for i in batch.samples]
        assert batch.num_tokens <= 100 or len(lengths) == 1
        assert max(lengths) <= MAX_STRETCH * min(lengths)
        assert batch.real.sum().item() == sum(lengths)
        values, mask = batch.spread(batch.targets.float())
        for row, i in enumerate(batch.samples):
            want = [float(t) for t, s in zip(data[i].ids, data[i].sampled, strict=True) if s]
            assert values[row][mask[row] > 0].tolist() == want
        seen += batch.samples
    assert sorted(seen) == list(range(40))


def test_steps_raise_the_probability_of_good_tokens(store: BaseStore) -> None:
    trainer = make(store, lr=5e-3)
    good = dataclasses.replace(samples(1)[0], advantage=1.0)
    bad = dataclasses.replace(samples(2, seed=5)[1], advantage=-1.0)

    def chosen(s: Sample) -> float:
        scores = trainer.score([s.ids])[0]
        return sum(float(scores[t - 1]) for t, hit in enumerate(s.sampled) if hit)

    before = chosen(good), chosen(bad)
    for _ in range(5):
        assert trainer.step([good, bad]).outcome is StepOutcome.NORMAL
    assert chosen(good) > before[0] + 0.1
    assert chosen(bad) < before[1]


def test_score_equals_the_models_log_probs(store: BaseStore) -> None:
    trainer = make(store)
    ids = [s.ids for s in samples(3)]
    for sequence, got in zip(ids, trainer.score(ids), strict=True):
        logp = store.model()(torch.tensor([sequence])).log_softmax(-1)[0]
        want = logp[:-1].gather(-1, torch.tensor(sequence[1:]).unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)


def test_nothing_to_learn_changes_nothing(store: BaseStore) -> None:
    trainer = make(store)
    before = {n: x.clone() for n, x in trainer.adapter().items()}
    report = trainer.step([dataclasses.replace(s, advantage=0.0) for s in samples()])
    assert report.outcome is StepOutcome.EMPTY
    assert all(torch.equal(before[n], x) for n, x in trainer.adapter().items())


def test_non_finite_gradients_skip_and_then_stop(store: BaseStore) -> None:
    trainer = make(store)
    before = {n: x.clone() for n, x in trainer.adapter().items()}
    bad = [dataclasses.replace(s, advantage=math.inf) for s in samples(2)]
    assert trainer.step(bad).outcome is StepOutcome.SKIPPED
    assert trainer.step(bad).outcome is StepOutcome.SKIPPED
    assert all(torch.equal(before[n], x) for n, x in trainer.adapter().items())
    with pytest.raises(TrainError, match="3 steps in a row"):
        trainer.step(bad)


def test_state_goes_on_bit_for_bit(store: BaseStore, tmp_path: Path) -> None:
    one, other = make(store), make(store)
    one.step(samples(seed=1))
    torch.save(one.state(), tmp_path / "s.pt")
    other.load_state(torch.load(tmp_path / "s.pt", weights_only=True))
    for trainer in (one, other):
        trainer.step(samples(seed=2))
    assert all(torch.equal(x, other.adapter()[n]) for n, x in one.adapter().items())


def test_reference_kl_pulls_back(store: BaseStore) -> None:
    free, held = make(store, lr=2e-2), make(store, lr=2e-2, kl_coef=50.0)
    base = store.model()
    for trainer in (free, held):
        for step in range(4):
            trainer.step(samples(seed=step))

    def distance(trainer: Trainer) -> float:
        ids = torch.tensor([samples(1)[0].ids])
        return float((trainer.model(ids) - base(ids)).abs().mean().detach())

    assert distance(held) < distance(free)
