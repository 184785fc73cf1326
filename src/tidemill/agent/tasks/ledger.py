"""Ledger: named numbers that exist only inside the sandbox, and a sum of three of them.

    user       oak+fir-elm
    assistant  calls python with `oak+fir-elm`
    tool       58
    assistant  58

The values are drawn for each episode and set in the sandbox's live interpreter; the prompt does not hold them, so only
a call can find the answer. The policy has to learn that it must call, to copy the expression, and to copy the result.

The warm-up has a half-hearted teacher: for sums without a minus it mostly calls the tool, for all others it mostly
gives up and answers `?`. That calling pays everywhere is left to reinforcement.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence

from tidemill.agent.task import Attempt, Drill, Problem, Setup, Split, SplitRule, Task, Turn, Verdict
from tidemill.core.config import require

NAMES = ("oak", "fir", "elm", "ash", "bay", "box", "yew", "fig", "gum", "nut", "palm", "pine")
GIVE_UP = "?"
CALLS_FOR_SUMS = 0.75
"""Share of expressions without a minus for which the teacher calls the tool."""
CALLS_OTHERWISE = 0.3
_TOOL = "python"


class LedgerTask(Task):
    """names: how many of NAMES are used. Values are integers from 10 to 99; prompts are all ordered triples of distinct
    names joined by + or -."""

    name = "ledger"
    tools = (_TOOL,)
    declare_tools = False
    grades_inline = True
    words = (*NAMES, "+", "-", GIVE_UP)

    def __init__(self, *, names: int = len(NAMES)) -> None:
        require(3 <= names <= len(NAMES), field="names", value=names, expected=f"3 to {len(NAMES)}")
        self._names = NAMES[:names]
        rule = SplitRule(test=0.25, dev=0.07, salt="ledger")
        triples = itertools.product(itertools.permutations(self._names, 3), "+-", "+-")
        prompts = [f"{a}{p}{b}{q}{c}" for (a, b, c), p, q in triples]
        self._prompts = rule.partition((_canonical(p), p) for p in prompts)

    def size(self, split: Split) -> int:
        return len(self._prompts[split])

    def make(self, split: Split, index: int, seed: int) -> Problem:
        prompts = self._prompts[split]
        prompt = prompts[index % len(prompts)]
        rng = random.Random(f"ledger/{split}/{index}/{seed}")
        values = {name: rng.randint(10, 99) for name in self._names}
        code = "; ".join(f"{name} = {value}" for name, value in values.items())
        return Problem(problem_id=f"{split}-{index}-{seed}", messages=({"role": "user", "content": prompt},),
                       answer=str(_value(prompt, values)), setup=Setup(code={_TOOL: code}),
                       metadata={"prompt": prompt})

    def grade(self, problem: Problem, attempt: Attempt) -> Verdict:
        """1 if the answer is exactly the sum, else 0."""
        right = attempt.complete and attempt.answer.strip() == problem.answer
        return Verdict(reward=float(right), correct=right, detail=f"expected {problem.answer}")

    def demonstrate(self, problem: Problem) -> Sequence[Turn]:
        return (Turn(tool=_TOOL, arguments={"code": problem.metadata["prompt"]}, result=problem.answer),
                Turn(answer=problem.answer))

    def teach(self, problem: Problem, rng: random.Random) -> Sequence[Turn]:
        """What the warm-up shows: the expert's turns, or giving up."""
        calls = CALLS_OTHERWISE if "-" in problem.metadata["prompt"] else CALLS_FOR_SUMS
        return self.demonstrate(problem) if rng.random() < calls else (Turn(answer=GIVE_UP),)

    def drills(self, rng: random.Random, count: int) -> Sequence[Drill]:
        """Half copy an expression of the train split into a call, half copy a result into the answer."""
        prompts = self._prompts[Split.TRAIN]
        out: list[Drill] = []
        for number in range(count):
            if number % 2:
                digits = rng.choice((1, 2, 2, 2, 3, 3, 3))
                result = str(rng.choice((1, 1, -1)) * rng.randrange(10**digits))
                message = {"role": "tool", "name": _TOOL, "tool_call_id": "1", "content": result}
                out.append(Drill(messages=(message,), answer=result))
            else:
                prompt = rng.choice(prompts)
                out.append(Drill(messages=({"role": "user", "content": prompt},), tool=_TOOL, key="code",
                                 argument=prompt))
        return out


def _terms(prompt: str) -> list[tuple[str, str]]:
    """(sign, name) of each term of an expression like `oak+fir-elm`."""
    return re.findall(r"([+-])([a-z]+)", f"+{prompt}")


def _canonical(prompt: str) -> str:
    """The same for every way to write one sum, so that a sum and its rearrangements share a split."""
    return "".join(sorted(sign + name for sign, name in _terms(prompt)))


def _value(prompt: str, values: Mapping[str, int]) -> int:
    return sum(values[name] if sign == "+" else -values[name] for sign, name in _terms(prompt))
