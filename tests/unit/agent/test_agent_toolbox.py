"""The three small tools, and the tasks that ask for them or for no tool at all."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.agent.task import Attempt, Demonstrator, Split, load_task
from tidemill.agent.tasks.toolbox import WITHOUT_TOOL, Request, draw
from tidemill.agent.tool import Bench, ToolCall, ToolLimits, invoke, load_tool
from tidemill.agent.tools.toolbox import OPERATIONS, calculate

TASK = load_task("toolbox")
TOOLS = {name: load_tool(name) for name in TASK.tools}


def bench() -> Bench:
    return Bench(None, {}, ToolLimits())


def called(name: str, at: Bench | None = None, **arguments: Any) -> ToolCall:
    return asyncio.run(invoke(TOOLS[name], arguments, at or bench()))


@given(st.integers(0, 9999), st.sampled_from("+-*"), st.integers(0, 9999), st.sampled_from("+-*"), st.integers(0, 99))
def test_the_calculator_computes(a: int, first: str, b: int, second: str, c: int) -> None:
    expression = f"{a} {first} {b} {second} {c}"
    assert calculate(expression) == str(eval(expression))


@pytest.mark.parametrize(("expression", "value"), [("7 // 2", "3"), ("-(3 - 10) % 4", "3"), ("2*(3+4)", "14")])
def test_more_of_the_calculator(expression: str, value: str) -> None:
    assert called("calculator", expression=expression).result.text == value


@pytest.mark.parametrize(("expression", "told"), [
    ("1 +", "not an expression"), ("1 / 2", "only integers"), ("2 ** 9", "only integers"), ("x", "only integers"),
    ("True", "only integers"), ("1.5", "only integers"), ("1 % 0", "division by zero"), ("9" * 201, "too long"),
    ("9" * 60 + "*" + "9" * 60, "too large"), ("__import__('os')", "only integers"),
])
def test_what_the_calculator_refuses_is_told_to_the_policy(expression: str, told: str) -> None:
    result = called("calculator", expression=expression).result
    assert told in result.text
    assert not result.ok


def test_the_text_tool() -> None:
    assert called("text", operation="reverse", text="ab c").result.text == "c ba"
    assert called("text", operation="words", text="ab c").result.text == "2"
    refused = called("text", operation="shout", text="ab").result
    assert not refused.ok
    assert all(name in refused.text for name in OPERATIONS)


def test_what_an_episode_writes_is_its_own() -> None:
    one, other = bench(), bench()
    before = called("files", other, action="read", path="notes/a.txt").result.text
    assert before
    assert called("files", one, action="write", path="notes/a.txt", content="mine").result.text == "saved"
    assert called("files", one, action="read", path="notes/a.txt").result.text == "mine"
    assert called("files", other, action="read", path="notes/a.txt").result.text == before
    assert called("files", one, action="list", path="notes").result.text.endswith(".txt")
    assert not called("files", one, action="burn", path="x").result.ok
    assert "content" in called("files", one, action="write", path="x").result.text


def test_demonstrations_are_what_the_tools_really_answer() -> None:
    assert isinstance(TASK, Demonstrator)
    kinds: set[str] = set()
    for index in range(300):
        problem = TASK.make(Split.TRAIN, index, 3)
        *calls, answer = TASK.demonstrate(problem)
        made = [called(turn.tool, **turn.arguments) for turn in calls]
        assert [call.result.text for call in made] == [turn.result for turn in calls]
        assert not any(call.error for call in made)
        attempt = Attempt(answer=answer.answer, complete=True, tool_calls=tuple(made))
        assert TASK.grade(problem, attempt).correct  # type: ignore[union-attr]
        kinds.add(calls[0].tool if calls else "")
    assert kinds == {"", "calculator", "text", "files"}


def test_wrong_attempts_are_wrong() -> None:
    problem = next(p for i in range(99) if (p := TASK.make(Split.TEST, i, 1)).metadata["request"].tool == "text")
    request: Request = problem.metadata["request"]
    right = called("text", **request.arguments)
    other = called("text", **(dict(request.arguments) | {"text": "something else"}))
    for attempt in (
        Attempt(answer=request.answer, complete=True),
        Attempt(answer=request.answer, complete=False, tool_calls=(right,)),
        Attempt(answer="no", complete=True, tool_calls=(right,)),
        Attempt(answer=request.answer, complete=True, tool_calls=(other,)),
        Attempt(answer=request.answer, complete=True, tool_calls=(right, right)),
    ):
        assert not TASK.grade(problem, attempt).correct  # type: ignore[union-attr]


def test_problems_are_pure_and_splits_apart() -> None:
    prompts = {split: {TASK.make(split, i, 1).messages[0]["content"] for i in range(200)} for split in Split}
    assert not prompts[Split.TRAIN] & prompts[Split.TEST]
    assert not prompts[Split.TRAIN] & prompts[Split.DEV]
    assert TASK.make(Split.DEV, 5, 1) == TASK.make(Split.DEV, 5, 1)
    assert TASK.make(Split.DEV, 5, 1) != TASK.make(Split.DEV, 5, 2)
    rng = random.Random(0)
    share = sum(not draw(rng).tool for _ in range(2000)) / 2000
    assert share == pytest.approx(WITHOUT_TOOL, abs=0.03)


def test_echo_wants_the_phrase_and_nothing_else() -> None:
    task = load_task("echo")
    assert isinstance(task, Demonstrator)
    phrases: set[str] = set()
    for index in range(50):
        problem = task.make(Split.TEST, index, 1)
        (turn,) = task.demonstrate(problem)
        phrases.add(turn.answer)
        assert turn.answer in problem.messages[0]["content"]
        assert task.grade(problem, Attempt(answer=turn.answer, complete=True)).correct  # type: ignore[union-attr]
        for answer, complete in ((turn.answer + ".", True), (turn.answer, False)):
            assert not task.grade(problem, Attempt(answer=answer, complete=complete)).correct  # type: ignore[union-attr]
    assert len(phrases) > 40
    trained = {task.make(Split.TRAIN, i, 1).answer for i in range(500)}
    assert not trained & phrases
