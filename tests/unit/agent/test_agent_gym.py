"""reasoning-gym datasets as tasks: splits without common questions, the library's own score, clear refusals."""

from __future__ import annotations

import importlib.util

import pytest

from tidemill.agent.task import Attempt, Split, load_task
from tidemill.core.errors import ConfigError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs tidemill[train]")


def test_splits_share_no_question_and_repeat() -> None:
    task = load_task("gym", {"dataset": "chain_sum", "train": 200, "dev": 40, "test": 80})
    again = load_task("gym", {"dataset": "chain_sum", "train": 200, "dev": 40, "test": 80})
    questions = {s: [task.make(s, i, 0).messages[-1]["content"] for i in range(task.size(s))] for s in Split}
    everything = [q for rows in questions.values() for q in rows]
    assert len(set(everything)) == len(everything) == 320
    assert [again.make(Split.TEST, i, 9) for i in range(80)] == [task.make(Split.TEST, i, 0) for i in range(80)]
    assert task.make(Split.DEV, 41, 0) == task.make(Split.DEV, 1, 0), "the index wraps"


def test_the_datasets_own_score_grades() -> None:
    task = load_task("gym", {"dataset": "chain_sum"})
    problem = task.make(Split.DEV, 0, 0)
    right = task.grade(problem, Attempt(answer=f"I think <answer> {problem.answer}</answer>", complete=True))
    assert (right.reward, right.correct) == (1.0, True)
    assert not task.grade(problem, Attempt(answer=str(problem.answer), complete=False)).correct
    partly = task.grade(problem, Attempt(answer=f"perhaps {problem.answer}", complete=True))
    assert 0 < partly.reward < 1
    assert not partly.correct


@pytest.mark.parametrize(("options", "message"), [
    ({"dataset": "no_such"}, "no such dataset"),
    ({"dataset": "chain_sum", "config": {"min_termz": 3}}, "min_termz"),
    ({"dataset": "chain_sum", "config": {"seed": 3}}, "seed cannot be set"),
    ({"dataset": "chain_sum", "dev": 0}, "dev = 0"),
    ({}, "dataset"),
])
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task("gym", options)


def test_small_datasets_say_that_they_are_used_up() -> None:
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = load_task("gym", {"dataset": "chain_sum", "config": small, "train": 4000})
    with pytest.raises(ConfigError, match="distinct questions in the train split"):
        task.make(Split.TRAIN, 3999, 0)
