"""Any dataset of reasoning-gym as a task: its questions, graded by its own scoring function. No tools, no sandbox.

Questions are generated in the library's order for one dataset seed; each goes to the split its text hashes to, and a
text that comes up twice is used once, so that no question of a split can be met in another.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from tidemill.agent.task import Attempt, Problem, Split, SplitRule, Task, Verdict
from tidemill.core.config import require
from tidemill.core.errors import ConfigError, SetupError

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PATIENCE = 1000
"""Questions in a row that bring nothing new to a split before the dataset counts as used up."""
_ENDLESS = 1_000_000


class GymTask(Task):
    """dataset: reasoning-gym's name. config: its settings. train, dev, test: distinct questions of each split.
    instruction: a system message, empty for none."""

    def __init__(self, *, dataset: str, config: Mapping[str, Any] | None = None, seed: int = 0, train: int = 8192,
                 dev: int = 256, test: int = 1024, instruction: str = "Answer with the result only.") -> None:
        self._sizes = {Split.TRAIN: train, Split.DEV: dev, Split.TEST: test}
        for split, size in self._sizes.items():
            require(size >= 1, field=split.value, value=size, expected="at least one question")
        self.name = f"gym:{dataset}"
        self._dataset = _create(dataset, dict(config or {}), seed, size=_ENDLESS)
        # Large shares for the small splits: some datasets take long per question, and a question of another split is
        # generated for nothing.
        self._rule = SplitRule(test=0.25, dev=0.25, salt=f"{dataset}/{seed}")
        self._instruction = instruction
        self._entries: dict[Split, list[dict[str, Any]]] = {s: [] for s in Split}
        self._seen: set[str] = set()
        self._next = 0

    def size(self, split: Split) -> int:
        return self._sizes[split]

    def make(self, split: Split, index: int, seed: int) -> Problem:
        """The seed changes nothing: a question is all there is to a problem. Raises ConfigError if the dataset has too
        few distinct questions."""
        number = index % self._sizes[split]
        entry = self._entry(split, number)
        system = ({"role": "system", "content": self._instruction},) if self._instruction else ()
        return Problem(
            problem_id=f"{split}-{number}", messages=(*system, {"role": "user", "content": entry["question"]}),
            answer=entry["answer"], metadata={"entry": entry},
        )

    def grade(self, problem: Problem, attempt: Attempt) -> Verdict:
        """The dataset's own score of the answer, or of what stands between <answer> tags; correct at full score."""
        tagged = _TAGGED.findall(attempt.answer)
        answer = (tagged[-1] if tagged else attempt.answer).strip()
        score = float(self._dataset.score_answer(answer, problem.metadata["entry"]))
        return Verdict(reward=score, correct=attempt.complete and score >= 1.0, detail=f"expected {problem.answer}")

    def _entry(self, split: Split, number: int) -> dict[str, Any]:
        rows = self._entries[split]
        fruitless = 0
        while len(rows) <= number:
            entry = self._dataset[self._next]
            self._next += 1
            before = len(rows)
            if entry["question"] not in self._seen:
                self._seen.add(entry["question"])
                self._entries[self._rule.split(entry["question"])].append(entry)
            fruitless = 0 if len(rows) > before else fruitless + 1
            if fruitless > _PATIENCE:
                raise ConfigError(
                    f"{self.name}: only {len(rows)} distinct questions in the {split} split, "
                    f"{self._sizes[split]} wanted", field=split.value,
                    remedy="Ask for fewer, or widen the dataset's config.",
                )
        return rows[number]


def _create(dataset: str, config: dict[str, Any], seed: int, *, size: int) -> Any:
    try:
        factory = importlib.import_module("reasoning_gym.factory")
    except ImportError as e:
        raise SetupError("reasoning-gym is not installed", remedy="pip install 'tidemill[train]'.") from e
    if dataset not in factory.DATASETS:
        raise ConfigError(f"dataset = {dataset!r}: reasoning-gym has no such dataset", field="dataset",
                          remedy="Its names are listed in the reasoning-gym gallery.")
    reserved = {"seed", "size"} & config.keys()
    if reserved:
        raise ConfigError(f"config: {', '.join(sorted(reserved))} cannot be set here", field="config",
                          remedy="Use the options seed, train, dev and test.")
    try:
        return factory.create_dataset(dataset, seed=seed, size=size, **config)
    except (TypeError, ValueError, AssertionError) as e:
        raise ConfigError(f"dataset {dataset!r}: config {config}: {e}", field="config") from e
