"""Verdicts on controls, and the random reward. The faults themselves meet a real engine in the sync tests."""

import pytest
from run_folder import CONFIG

from tidemill.core.errors import ConfigError
from tidemill.train.config import ControlSection
from tidemill.train.controls import ControlOutcome, control_settings, judge, plant, random_reward


def outcome(stopped_by: str, *, before: float = 0.3, after: float = 0.3, served: int = 1) -> ControlOutcome:
    return ControlOutcome(stopped_by=stopped_by, steps=5, accuracy_before=before, accuracy_after=after,
                          served_version=served)


@pytest.mark.parametrize(("expect", "happened", "behaved"), [
    ("canary-stops", outcome("canary"), True),
    ("canary-stops", outcome("steps"), False),
    ("canary-stops", outcome("sync-refused"), False),
    ("sync-refused", outcome("sync-refused"), True),
    ("sync-refused", outcome("sync-refused", served=2), False),
    ("sync-refused", outcome("canary"), False),
    ("flat", outcome("steps"), True),
    ("flat", outcome("steps", after=0.39), True),
    ("flat", outcome("steps", after=0.41), False),
    ("flat", outcome("steps", after=0.0), True),
    ("flat", outcome("canary"), False),
])
def test_verdicts(expect: str, happened: ControlOutcome, behaved: bool) -> None:
    settings = ControlSection(steps=9, expect=expect, tolerance=0.1)  # type: ignore[arg-type]
    verdict = judge("x", settings, happened)
    assert verdict.behaved is behaved
    assert happened.stopped_by in verdict.why
    assert verdict.to_json()["outcome"]["steps"] == 5


def test_settings_come_from_the_recipe() -> None:
    assert control_settings(CONFIG, "bit-flip").steps == 3
    with pytest.raises(ConfigError, match="expected one of frozen-engine"):
        control_settings(CONFIG, "frozen")
    with pytest.raises(ConfigError, match="recipe demo defines bit-flip"):
        control_settings(CONFIG, "zero-scale")


def test_random_reward_is_a_fair_function_of_the_tokens() -> None:
    rewards = [random_reward([i, i * 7 % 91, 3]) for i in range(2000)]
    assert set(rewards) == {0.0, 1.0}
    assert 0.45 < sum(rewards) / len(rewards) < 0.55
    assert rewards[5] == random_reward([5, 35, 3])


def test_random_reward_plants_nothing_between_trainer_and_engine() -> None:
    engine = object()
    assert plant("random-reward", engine) is engine  # type: ignore[arg-type]
