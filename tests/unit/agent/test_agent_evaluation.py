"""Evaluations: resumable rows, estimates, paired comparison."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.agent.episode import Episode
from tidemill.agent.evaluation import EvalSpec, Evaluation, compare
from tidemill.agent.rollout import EpisodeRequest
from tidemill.agent.task import Task, Verdict, load_task
from tidemill.core.errors import InputError, IntegrityError, SetupError
from tidemill.core.outcomes import Outcome
from tidemill.core.token_log import TokenLog

Judge = Callable[[EpisodeRequest], Outcome]


def spec(**changes: Any) -> EvalSpec:
    known: dict[str, Any] = {
        "task": "ledger", "options": {}, "split": "dev", "n": 12, "k": 1, "seed": 5, "temperature": 0.0,
        "harness": "forced", "max_tokens": 24, "effort": "", "limits": {"max_turns": 2}, "policy": {"model": "m"},
        "version": "0",
    }
    return EvalSpec(**known | changes)


def player(judge: Judge, seen: list[EpisodeRequest] | None = None) -> Any:
    """Plays by verdict, in whatever order a few sleeps make."""
    async def play(request: EpisodeRequest) -> Episode:
        if seen is not None:
            seen.append(request)
        await asyncio.sleep(0.001 * (request.draw.sequence % 3))
        outcome = judge(request)
        lost = outcome is Outcome.INFRA_ERROR
        log = TokenLog()
        log.give([1, 2])
        log.sample([3], [0.0], [0])
        return Episode(problem_id=request.problem.problem_id, log=log, outcome=outcome, answer="a",
                       reward=None if lost else float(outcome is Outcome.OK), error="gone" if lost else "",
                       verdict=None if lost else Verdict(reward=0.0, correct=outcome is Outcome.OK))

    return play


def right(request: EpisodeRequest) -> Outcome:
    return Outcome.OK


@pytest.fixture(scope="module")
def task() -> Task:
    return load_task("ledger")


def run(task: Task, folder: Path, judge: Judge, *, seen: list[EpisodeRequest] | None = None,
        **changes: Any) -> Evaluation:
    evaluation = Evaluation.open(folder, spec(**changes))
    asyncio.run(evaluation.run(task, player(judge, seen), concurrency=4))
    return evaluation


def test_every_attempt_is_a_row_with_its_own_random_numbers(task: Task, tmp_path: Path) -> None:
    seen: list[EpisodeRequest] = []
    found = run(task, tmp_path, right, seen=seen, n=5, k=3).summary()
    rows = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert sorted((r["item"], r["sample"]) for r in rows) == [(i, j) for i in range(5) for j in range(3)]
    assert sorted((r.draw.seed, r.draw.sequence) for r in seen) == [(5, s) for s in range(15)]
    assert all((r["sampled_tokens"], r["total_tokens"], r["correct"]) == (1, 3, True) for r in rows)
    assert found["avg@3"]["point"] == 1.0
    assert found["outcomes"] == {"ok": 15}
    assert (found["harness"], found["max_tokens"], found["limits"]) == ("forced", 24, {"max_turns": 2})


def test_estimates_follow_from_the_rows(task: Task, tmp_path: Path) -> None:
    # Item i is right in the first i of 4 attempts.
    found = run(task, tmp_path, lambda r: Outcome.OK if r.draw.sequence % 4 < r.draw.sequence // 4 else Outcome.WRONG,
                n=5, k=4).summary()
    assert found["avg@4"]["point"] == pytest.approx(0.5)
    assert found["pass"]["pass@1"]["point"] == pytest.approx(0.5)
    assert found["pass"]["pass@2"]["point"] == pytest.approx((0 + 1 / 2 + 5 / 6 + 1 + 1) / 5)
    assert found["pass"]["pass@4"]["point"] == pytest.approx(0.8)
    assert found["pass"]["pass@4"]["method"] == "wilson"
    assert found["avg@4"]["lo95"] < 0.5 < found["avg@4"]["hi95"]


def test_a_killed_evaluation_goes_on_with_what_is_missing(task: Task, tmp_path: Path) -> None:
    whole = run(task, tmp_path / "whole", right).summary()
    first = run(task, tmp_path / "cut", right, n=12)
    lines = first.items.read_text().splitlines(keepends=True)
    first.items.write_text("".join(lines[:7]) + lines[7][:20])
    seen: list[EpisodeRequest] = []
    again = run(task, tmp_path / "cut", right, seen=seen)
    assert again.kept == 7
    assert len(seen) == 5
    assert [json.loads(line)["outcome"] for line in again.items.read_text().splitlines()] == ["ok"] * 12
    assert again.summary() == whole


def test_more_items_may_be_asked_for_later(task: Task, tmp_path: Path) -> None:
    run(task, tmp_path, right, n=4)
    seen: list[EpisodeRequest] = []
    assert run(task, tmp_path, right, seen=seen, n=6).summary()["n"] == 6
    assert len(seen) == 2


@pytest.mark.parametrize("change", [{"k": 2}, {"seed": 6}, {"max_tokens": 9}, {"policy": {"model": "other"}},
                                    {"harness": "free"}, {"split": "test"}])
def test_another_evaluation_in_the_folder_is_refused(task: Task, tmp_path: Path, change: dict[str, Any]) -> None:
    run(task, tmp_path, right)
    with pytest.raises(InputError, match=next(iter(change))):
        Evaluation.open(tmp_path, spec(**change))


def test_lost_attempts_are_no_zeros_and_are_tried_again(task: Task, tmp_path: Path) -> None:
    lost = run(task, tmp_path, lambda r: Outcome.INFRA_ERROR if r.draw.sequence < 3 else Outcome.OK)
    found = lost.summary()
    assert (found["n"], found["missing"], found["avg@1"]["point"]) == (9, 3, 1.0)
    assert lost.failures == {"gone": 3}
    seen: list[EpisodeRequest] = []
    found = run(task, tmp_path, lambda r: Outcome.WRONG, seen=seen).summary()
    assert len(seen) == 3
    assert (found["n"], found["missing"], found["avg@1"]["point"]) == (12, 0, 0.75)


def test_nothing_graded_is_no_estimate(task: Task, tmp_path: Path) -> None:
    found = run(task, tmp_path, lambda r: Outcome.INFRA_ERROR).summary()
    assert found["avg@1"] == {"point": None, "lo95": 0.0, "hi95": 1.0, "n": 0, "method": "none"}


def test_results_do_not_depend_on_order(task: Task, tmp_path: Path) -> None:
    def judge(request: EpisodeRequest) -> Outcome:
        return Outcome.OK if random.Random(request.draw.sequence).random() < 0.6 else Outcome.WRONG

    one = Evaluation.open(tmp_path / "a", spec(k=2))
    asyncio.run(one.run(task, player(judge), concurrency=1))
    many = run(task, tmp_path / "b", judge, k=2)
    assert one.summary() == many.summary()


def test_comparison_is_paired(task: Task, tmp_path: Path) -> None:
    def odd(request: EpisodeRequest) -> Outcome:
        return Outcome.OK if request.draw.sequence % 2 else Outcome.WRONG

    a = run(task, tmp_path / "a", odd, n=40)
    b = run(task, tmp_path / "b", lambda r: Outcome.OK if r.draw.sequence != 1 else Outcome.WRONG, n=30,
            policy={"model": "b"})
    found = compare(a, b)
    assert found["n"] == 30
    assert (found["accuracy_a"], found["accuracy_b"]) == (0.5, pytest.approx(29 / 30))
    assert found["mcnemar"] == {"only_a": 1, "only_b": 15, "p": pytest.approx(2 * 17 / 2**16)}
    assert 0.2 < found["difference"]["lo95"] < found["difference"]["point"] < found["difference"]["hi95"] < 0.7
    assert found["differing_settings"] == {"n": [40, 30], "policy": [{"model": "m"}, {"model": "b"}]}
    reread = compare(Evaluation.read(tmp_path / "a"), Evaluation.read(tmp_path / "b"))
    assert reread == found


def test_comparison_of_several_attempts_has_no_mcnemar(task: Task, tmp_path: Path) -> None:
    a, b = run(task, tmp_path / "a", right, k=2), run(task, tmp_path / "b", right)
    found = compare(a, b)
    assert "mcnemar" not in found
    assert (found["difference"]["lo95"], found["difference"]["hi95"]) == (0.0, 0.0)


def test_incomparable_runs_are_refused(task: Task, tmp_path: Path) -> None:
    a, b = run(task, tmp_path / "a", right), run(task, tmp_path / "b", right, seed=6)
    with pytest.raises(InputError, match="seed is 5 in A and 6 in B"):
        compare(a, b)
    empty = Evaluation.open(tmp_path / "c", spec())
    with pytest.raises(InputError, match="no item in common"):
        compare(a, empty)


@pytest.mark.parametrize("change", [{"n": 0}, {"k": 0}, {"max_tokens": -1}, {"temperature": -0.5}])
def test_bad_sizes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(change))):
        spec(**change)


def test_damaged_files_are_named(task: Task, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no evaluation"):
        Evaluation.read(tmp_path)
    run(task, tmp_path, right)
    (tmp_path / "items.jsonl").write_text("{broken\n")
    with pytest.raises(IntegrityError, match="damaged"):
        Evaluation.read(tmp_path)
    (tmp_path / "eval.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"eval\.json"):
        Evaluation.read(tmp_path)


def test_a_full_disk_is_an_error_with_a_remedy(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, row: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tidemill.agent.evaluation.append_jsonl", full)
    with pytest.raises(SetupError, match="No space left"):
        run(task, tmp_path, right)
