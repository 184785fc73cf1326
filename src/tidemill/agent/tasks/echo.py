"""Echo: say a phrase again, letter by letter. No tools. What every use of a tool is made of, in its shortest form.

    user       Say: cedar 41 qxw
    assistant  cedar 41 qxw
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tidemill.agent.task import Attempt, Drill, Problem, Split, SplitRule, Task, Turn, Verdict
from tidemill.agent.tasks.phrases import phrase

SIZES = {Split.TRAIN: 1_000_000, Split.DEV: 4096, Split.TEST: 4096}
PROMPTS = ("Say: {}", "Repeat after me: {}", 'Say "{}".', "{} Repeat that.")


class EchoTask(Task):
    """An answer is correct if it is the phrase exactly."""

    name = "echo"
    grades_inline = True

    def __init__(self) -> None:
        self._rule = SplitRule(test=0.1, dev=0.1, salt="echo")

    def size(self, split: Split) -> int:
        return SIZES[split]

    def make(self, split: Split, index: int, seed: int) -> Problem:
        rng = random.Random(f"echo/{split}/{index % SIZES[split]}/{seed}")
        while self._rule.split(said := phrase(rng)) is not split:
            pass
        message = {"role": "user", "content": rng.choice(PROMPTS).format(said)}
        return Problem(problem_id=f"{split}-{index % SIZES[split]}-{seed}", messages=(message,), answer=said)

    def grade(self, problem: Problem, attempt: Attempt) -> Verdict:
        right = attempt.complete and attempt.answer == problem.answer
        return Verdict(reward=float(right), correct=right, detail=f"expected {problem.answer!r}")

    def demonstrate(self, problem: Problem) -> Sequence[Turn]:
        return (Turn(answer=problem.answer),)

    def drills(self, rng: random.Random, count: int) -> Sequence[Drill]:
        """None: a problem is short."""
        return ()
