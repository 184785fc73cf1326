"""EngineCore: requests, sessions, scoring, aborts, failures of one request, sleep and wake, agreement with training."""

from __future__ import annotations

import pytest
import torch

from tidemill.core.engine_api import FinishReason
from tidemill.core.errors import BusyError, InputError, IntegrityError, NonFiniteError, NotFoundError
from tidemill.engine import messages as m
from tidemill.engine.memory.pools import StateRecord
from tidemill.model.lora import load_adapter


def prompt(n: int, seed: int = 0, vocab: int = 96) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (n,), generator=generator).tolist()


def test_a_generation_reports_every_token_once(driver):
    engine = driver()
    call = engine.start(prompt(10), name="a", stream=True, max_tokens=5, top_logprobs=3)
    engine.run()
    done = engine.result(call)
    assert [t.event.token_id for t in engine.tokens] == list(done.ids)
    assert [t.event.position for t in engine.tokens] == [10, 11, 12, 13, 14]
    assert [t.event.logprob for t in engine.tokens] == list(done.logprobs)
    assert done.finish_reason is FinishReason.LENGTH
    assert (done.prompt_tokens, done.cached_tokens, done.versions) == (10, 0, (0,) * 5)
    for event, model in zip(done.top, done.model_logprobs, strict=True):
        values = [v for _, v in event]
        assert values == sorted(values, reverse=True)
        assert len(event) == 3
        assert values[0] >= model
    assert engine.core.info().stats["free_slots"] == 8


@pytest.mark.parametrize(("name", "bound"), [("fresh", 1e-5), ("tiny", 1e-4), ("toy", 1e-4), ("linear", 1e-4)])
def test_logprobs_agree_with_the_training_forward(driver, adapter, name, bound):
    """The spread-out bases are sharp: fp32 noise alone moves their log-probs by some 1e-5 (against fp64)."""
    engine = driver(name)
    made = adapter(engine, seed=3)
    ids = prompt(100, seed=1)
    for version in (0, 1):
        model = engine.store.model()
        if version:
            engine.sync(made, 1)
            load_adapter(model, made.lora, made.tensors)
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0].double()
        for temperature in (1.0, 0.6):
            logp = (logits / temperature).log_softmax(-1)
            want = logp[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
            got = torch.tensor(engine.call(m.Score, tuple(ids), temperature), dtype=torch.float64)
            assert len(got) == 99
            assert (got - want).abs().max() < bound / temperature
            assert ((got - want) ** 2).mean() / 2 < 1e-9


def test_sampled_logprob_is_what_scoring_says_later(driver):
    engine = driver()
    ids = prompt(30)
    done = engine.generate(ids, max_tokens=20, temperature=0.8)
    scores = engine.call(m.Score, (*ids, *done.ids), 0.8)
    assert scores[29:] == done.logprobs
    raw = engine.call(m.Score, (*ids, *done.ids), 1.0)
    assert raw[29:] == done.model_logprobs


def test_greedy_takes_the_best_and_has_logprob_zero(driver):
    engine = driver()
    done = engine.generate(prompt(12), temperature=0, max_tokens=6, top_logprobs=1)
    assert done.logprobs == (0.0,) * 6
    assert [t[0][0] for t in done.top] == list(done.ids)
    assert [t[0][1] for t in done.top] == list(done.model_logprobs)


def test_stop_tokens_end_a_request_and_min_tokens_masks_them(driver):
    engine = driver()
    free = engine.generate(prompt(12), max_tokens=12)
    stop = free.ids[2]
    done = engine.generate(prompt(12), max_tokens=12, stop_token_ids=(stop,))
    assert done.finish_reason is FinishReason.STOP
    assert done.ids == free.ids[: free.ids.index(stop) + 1]
    later = engine.generate(prompt(12), max_tokens=12, stop_token_ids=(stop,), min_tokens=8)
    assert stop not in later.ids[:8]
    assert len(later.ids) > 8 or later.ids[-1] == stop


def test_penalties_and_bias_change_what_is_sampled_and_not_the_models_logprob(driver):
    engine = driver()
    ids = prompt(12)
    plain = engine.generate(ids, temperature=0, max_tokens=30)
    forced = engine.generate(ids, temperature=0, max_tokens=3, logit_bias=((5, 100.0),))
    assert forced.ids == (5, 5, 5)
    scores = engine.call(m.Score, (*ids, 5, 5, 5), 1.0)
    assert scores[-3:] == forced.model_logprobs
    varied = engine.generate(ids, temperature=0, max_tokens=30, presence_penalty=2.0, frequency_penalty=2.0)
    assert len(set(varied.ids)) >= len(set(plain.ids))


def test_context_limit_ends_with_length(driver):
    engine = driver(max_model_len=70)
    done = engine.generate(prompt(65), max_tokens=100)
    assert len(done.ids) == 5
    assert done.finish_reason is FinishReason.LENGTH
    with pytest.raises(InputError, match=r"70 tokens do not fit .* max_model_len = 70"):
        engine.generate(prompt(70), max_tokens=1)
    assert engine.generate(prompt(70), max_tokens=0).ids == ()


@pytest.mark.parametrize(("change", "field"), [
    ({"ids": []}, "ids"), ({"ids": [96]}, "ids"), ({"ids": [-1]}, "ids"), ({"ids": [1] * 600}, "ids"),
    ({"temperature": -1.0}, "temperature"), ({"temperature": 1e-9}, "temperature"), ({"top_p": 0.0}, "top_p"),
    ({"min_p": 2.0}, "min_p"), ({"top_k": -1}, "top_k"), ({"max_tokens": -1}, "max_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"), ({"stop_token_ids": (96,)}, "stop_token_ids"),
    ({"logit_bias": ((1, 101.0),)}, "logit_bias"), ({"logit_bias": ((97, 1.0),)}, "logit_bias"),
    ({"frequency_penalty": 3.0}, "frequency_penalty"), ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 1, "stop_token_ids": tuple(range(96))}, "stop_token_ids"),
])
def test_bad_requests_are_refused_by_field(driver, change, field):
    engine = driver()
    with pytest.raises(InputError) as caught:
        engine.generate(change.pop("ids", [1, 2]), **change)
    assert caught.value.field == field
    assert not engine.core.has_work


def test_request_ids_are_unique_while_running(driver):
    engine = driver()
    engine.start([1], name="same")
    with pytest.raises(InputError, match="already running"):
        engine.generate([1], name="same")
    engine.run()
    engine.generate([1], name="same")


def test_sessions_continue_to_the_bits_of_one_prompt(driver):
    engine = driver()
    engine.call(m.OpenSession, "s")
    first, extra = prompt(40), prompt(20, seed=5)
    one = engine.generate(first, session="s", max_tokens=6)
    two = engine.generate(extra, session="s", max_tokens=6, scores=True)
    whole = [*first, *one.ids, *extra]
    assert engine.core.session_ids("s") == (*whole, *two.ids)
    assert (two.prompt_tokens, two.cached_tokens) == (66, 45)
    alone = engine.generate(whole, max_tokens=6, scores=True)
    assert (alone.ids, alone.logprobs) == (two.ids, two.logprobs)
    assert two.prompt_logprobs == alone.prompt_logprobs[-20:]
    assert alone.prompt_logprobs[0] is None
    again = engine.generate([], session="s", max_tokens=2)
    assert again.cached_tokens == 71


def test_session_refusals(driver):
    engine = driver()
    with pytest.raises(NotFoundError, match="no session 'x'"):
        engine.generate([1], session="x")
    engine.call(m.OpenSession, "x")
    with pytest.raises(InputError, match="exists already"):
        engine.call(m.OpenSession, "x")
    with pytest.raises(InputError, match="no earlier token"):
        engine.generate([], session="x")
    call = engine.start([1, 2], session="x", name="first")
    with pytest.raises(BusyError, match="working on request 'first'"):
        engine.call(m.Generate, *engine_request(session="x"))
    engine.run()
    assert engine.result(call).finish_reason is FinishReason.LENGTH
    before = engine.core.session_ids("x")
    with pytest.raises(InputError):
        engine.generate([96], session="x")
    assert engine.core.session_ids("x") == before
    engine.call(m.CloseSession, "x")
    engine.call(m.CloseSession, "x")
    with pytest.raises(NotFoundError):
        engine.generate([1], session="x")
    assert engine.core.residency.slots.num_used == 0


def engine_request(**kwargs):
    from tidemill.core.engine_api import GenerateRequest, SamplingParams

    return GenerateRequest(request_id="second", ids=(1,), session_id=kwargs["session"],
                           sampling=SamplingParams(max_tokens=1)), False


def test_abort_and_cancel_in_every_phase(driver):
    engine = driver(max_running=2)
    calls = {name: engine.start(prompt(100), name=name, max_tokens=50) for name in "abc"}
    engine.step()
    for name in "ac":  # one is prefilling, one waits
        engine.call_now = engine.post(m.Abort, name)
    engine.post(m.Cancel, calls["b"])
    engine.run()
    for call in calls.values():
        assert engine.result(call).finish_reason is FinishReason.ABORT
    assert engine.call(m.Abort, "nobody") is None
    assert engine.core.residency.slots.num_used == engine.core.residency.pages.num_used == 0


def test_closing_a_session_ends_its_request(driver):
    engine = driver()
    engine.call(m.OpenSession, "s")
    call = engine.start(prompt(100), session="s", max_tokens=50)
    engine.step()
    engine.call(m.CloseSession, "s")
    assert engine.result(call).finish_reason is FinishReason.ABORT
    assert engine.core.residency.slots.num_used == 0


def test_an_aborted_session_goes_on_to_the_same_bits(driver):
    engine = driver()
    engine.call(m.OpenSession, "s")
    call = engine.start(prompt(50), session="s", name="r", max_tokens=50)
    for _ in range(7):
        engine.step()
    engine.post(m.Abort, "r")
    engine.run()
    sampled = engine.result(call).ids
    assert 0 < len(sampled) < 50
    went_on = engine.generate([3], session="s", max_tokens=4)
    alone = engine.generate([*prompt(50), *sampled, 3], max_tokens=4)
    assert went_on.cached_tokens > 0
    assert (went_on.ids, went_on.logprobs) == (alone.ids, alone.logprobs)


def test_nan_in_one_requests_state_ends_only_that_request(driver):
    engine = driver()
    expected = [engine.generate(prompt(40, seed=i), max_tokens=10).logprobs for i in range(4)]
    calls = [engine.start(prompt(40, seed=i), name=f"n{i}", max_tokens=10) for i in range(4)]
    while not all(r.ids for r in engine.core.scheduler.running) or not engine.core.scheduler.running:
        engine.step()
    victim = next(r for r in engine.core.scheduler.running if r.request_id == "n2")
    layer = next(iter(engine.core.pools.kda))
    engine.core.pools.kda[layer][victim.sequence.slot, 0, 0, 0] = torch.nan
    engine.run()
    for i, call in enumerate(calls):
        done = engine.result(call)
        if i == 2:
            assert done.finish_reason is FinishReason.ERROR
            assert "not finite at position" in done.error
            assert len(done.ids) < 10
        else:
            assert done.logprobs == expected[i]
    assert engine.core.info().stats["failed_requests"] == 1
    # The places it held are clean for the next holder.
    for i in range(4):
        assert engine.generate(prompt(40, seed=i), max_tokens=10).logprobs == expected[i]


def test_nan_in_a_weights_row_ends_only_requests_that_use_it(driver):
    engine = driver()
    healthy = prompt(40, seed=1, vocab=90)
    # Sampled tokens may not hit the broken row either: forbid it.
    rules = {"max_tokens": 6, "logit_bias": ((95, -100.0),)}
    expected = engine.generate(healthy, **rules)
    table = engine.core.weights.embed_tokens.clone()
    table[95] = torch.nan
    engine.core.weights.embed_tokens = table
    bad = engine.start([*prompt(20, vocab=90), 95, 3], name="bad", **rules)
    scored = engine.post(m.Score, (1, 2, 95, 4, 5), 1.0)
    good = engine.start(healthy, name="good", **rules)
    engine.run()
    assert engine.result(bad).finish_reason is FinishReason.ERROR
    assert engine.result(good).logprobs == expected.logprobs
    with pytest.raises(NonFiniteError, match="not finite at position"):
        engine.result(scored)


def test_a_nan_prefill_aborted_before_its_test_leaves_finite_pages(driver):
    engine = driver(max_model_len=64, max_running=1)
    expected = engine.generate(prompt(30), max_tokens=3)
    table = engine.core.weights.embed_tokens.clone()
    engine.core.weights.embed_tokens = table.clone()
    engine.core.weights.embed_tokens[95] = torch.nan
    engine.start([95] * 50, name="bad", max_tokens=1)
    engine.step()
    engine.post(m.Abort, "bad")
    engine.run()
    engine.core.weights.embed_tokens = table
    assert engine.generate(prompt(30), max_tokens=3).logprobs == expected.logprobs


def test_an_infinite_logit_is_tested_before_any_mask(driver):
    engine = driver()
    head = engine.core.weights.lm_head.clone()
    head[7] = torch.inf
    engine.core.weights.lm_head = head
    done = engine.generate(prompt(5), stop_token_ids=(7,), min_tokens=3, logit_bias=((7, -100.0),))
    assert done.finish_reason is FinishReason.ERROR


def test_scoring_needs_nothing_of_the_last_token_and_one_token_scores_nothing(driver):
    engine = driver()
    assert engine.call(m.Score, (5,), 1.0) == ()
    scores = engine.call(m.Score, tuple(prompt(70)), 1.0)
    assert len(scores) == 69
    assert max(scores) < 0
    with pytest.raises(InputError, match="temperature"):
        engine.call(m.Score, (1, 2), 0.0)


def test_sleep_frees_resident_memory_and_wake_gives_the_same_bits(driver):
    engine = driver("toy", pool_bytes=1 << 28, max_model_len=4096, max_running=256, max_batched_tokens=1024)
    for tensor in (*engine.core.pools.kda.values(), *engine.core.pools.latents.values()):
        tensor.fill_(0.0)  # touch every page of memory
    engine.call(m.OpenSession, "s")
    engine.generate(prompt(40), session="s", max_tokens=5)
    report = engine.call(m.Sleep, ("pools", "derived"))
    assert report.expected_bytes > 100 << 20
    assert report.freed_bytes > 0.95 * report.expected_bytes
    assert engine.core.pools.arena.resident_bytes() == engine.core.weights.derived.resident_bytes == 0
    assert engine.core.info().asleep == ("pools", "derived")
    for kind, args in ((m.Generate, engine_request(session=None)), (m.Score, ((1, 2), 1.0))):
        with pytest.raises(BusyError, match="sleeps"):
            engine.call(kind, *args)
    with pytest.raises(BusyError, match="asleep already"):
        engine.call(m.Sleep, ("pools",))
    woke = engine.call(m.Wake, ("pools", "derived"))
    assert woke.expected_bytes < 0
    assert engine.core.info().asleep == ()
    after = engine.generate([1, 2], session="s", max_tokens=5)
    assert after.cached_tokens == 0
    fresh = driver("toy", max_model_len=4096)
    whole = engine.core.session_ids("s")[:47]
    assert fresh.generate(whole, max_tokens=5).logprobs == after.logprobs


def test_sleep_interrupts_running_requests_and_wake_resumes_them(driver):
    engine = driver()
    expected = engine.generate(prompt(40), max_tokens=20)
    call = engine.start(prompt(40), max_tokens=20)
    for _ in range(6):
        engine.step()
    engine.post(m.Sleep, ("pools",))
    engine.run()
    assert call not in engine.replies
    engine.call(m.Wake, ("pools",))
    assert engine.result(call).logprobs == expected.logprobs


@pytest.mark.parametrize(("kind", "tags", "error"), [
    (m.Sleep, (), InputError), (m.Sleep, ("weights",), InputError), (m.Wake, ("pools",), BusyError),
    (m.Wake, ("x",), InputError),
])
def test_sleep_tags_are_checked(driver, kind, tags, error):
    with pytest.raises(error):
        driver().call(kind, tags)


def test_a_changed_base_is_noticed_at_wake(driver):
    engine = driver()
    engine.call(m.Sleep, ("derived",))
    engine.core.weights.embed_tokens[0, 0] += 1.0  # copy-on-write view of the file
    for _ in range(200):  # each wake hashes a few tensors, going round the whole base
        call = engine.post(m.Wake, ("derived",))
        engine.run()
        if isinstance(engine.replies[call], m.Failure):
            break
        engine.call(m.Sleep, ("derived",))
    with pytest.raises(IntegrityError, match="embed_tokens"):
        engine.result(call)
    assert engine.core.info().asleep == ("derived",)


def test_state_records_refuse_another_layout(driver):
    engine = driver()
    engine.call(m.OpenSession, "s")
    engine.generate(prompt(70), session="s", max_tokens=1)
    sequence = engine.core._sessions["s"]
    record = engine.core.pools.record(sequence, numerics=engine.core.runner.numerics, version=0)
    assert record.latents.shape[1] == record.computed == 70
    record.require_layout(engine.core.pools.layout, engine.core.runner.numerics)
    with pytest.raises(IntegrityError, match="layout"):
        record.require_layout("gpu values-first", engine.core.runner.numerics)
    with pytest.raises(IntegrityError, match="numerics"):
        record.require_layout(engine.core.pools.layout, "other")
    assert isinstance(record, StateRecord)
