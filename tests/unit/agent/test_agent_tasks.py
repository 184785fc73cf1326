"""Splits, registry, the ledger and its demonstrations, the words of the tools."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.agent.task import Attempt, Demonstrator, Split, SplitRule, load_task
from tidemill.agent.tool import ToolLimits, cut_text, declaration, load_tool, present
from tidemill.core.errors import ConfigError
from tidemill.core.sandbox_api import ExecResult

LEDGER = load_task("ledger")


@given(st.lists(st.text(), unique=True), st.text())
def test_split_rule_partitions(keys: list[str], salt: str) -> None:
    rule = SplitRule(test=0.3, dev=0.2, salt=salt)
    parts = rule.partition((key, key) for key in keys)
    assert sorted(k for part in parts.values() for k in part) == sorted(keys)
    again = rule.partition((key, key) for key in reversed(keys))
    assert {s: set(p) for s, p in again.items()} == {s: set(p) for s, p in parts.items()}
    assert all(rule.split(key) is split for split, part in parts.items() for key in part)


def test_split_shares_are_about_right_and_checked() -> None:
    rule = SplitRule(test=0.25, dev=0.05)
    counts = [rule.split(str(i)) for i in range(10_000)]
    assert abs(counts.count(Split.TEST) - 2500) < 200
    assert abs(counts.count(Split.DEV) - 500) < 100
    with pytest.raises(ConfigError, match="add up to at most 1"):
        SplitRule(test=0.9, dev=0.2)


def test_ledger_splits_are_disjoint_by_value_of_the_sum() -> None:
    task = load_task("ledger")
    assert task.size(Split.TEST) >= 1024
    assert task.size(Split.DEV) >= 256
    assert sum(task.size(s) for s in Split) == 12 * 11 * 10 * 4
    sums: dict[str, set[Split]] = {}
    for split in Split:
        prompts = {task.make(split, i, 0).messages[0]["content"] for i in range(task.size(split))}
        assert len(prompts) == task.size(split)
        for prompt in prompts:
            terms = ("+" + prompt).replace("-", " -").replace("+", " +").split()
            sums.setdefault("".join(sorted(terms)), set()).add(split)
    assert all(len(found) == 1 for found in sums.values())


@given(index=st.integers(0, 5000), seed=st.integers(0, 2**63))
def test_ledger_problems_are_pure_and_hold_their_answer(index: int, seed: int) -> None:
    task = LEDGER
    problem = task.make(Split.TRAIN, index, seed)
    assert problem == task.make(Split.TRAIN, index, seed)
    assert problem.setup is not None
    names: dict[str, Any] = {}
    exec(problem.setup.code["python"], names)
    prompt = problem.messages[0]["content"]
    assert str(eval(prompt, names)) == problem.answer
    assert str(names["oak"]) not in prompt, "the values are nowhere in the prompt"
    assert task.grade(problem, Attempt(answer=f" {problem.answer}\n", complete=True)).correct
    assert not task.grade(problem, Attempt(answer=problem.answer, complete=False)).correct
    assert not task.grade(problem, Attempt(answer=f"{problem.answer}0", complete=True)).correct


def test_demonstrations_and_drills_stay_in_budget(stage: Any) -> None:
    task = stage.task
    assert isinstance(task, Demonstrator)
    scaffold = stage.harness().scaffold
    problems = [task.make(Split.TRAIN, i, i) for i in range(200)]
    logs = [scaffold.demonstration(p, task.demonstrate(p)) for p in problems]
    assert max(log.num_sampled for log in logs) <= 20
    assert max(len(log) for log in logs) <= 130
    for word in (*task.words, "python", '"', "message", "response", " role"):
        assert len(stage.codec.vocabulary.encode_text(word)) == 1
    drills = [scaffold.drill(d) for d in task.drills(random.Random(1), 40)]
    assert max(len(log) for log in drills) <= 45
    held_out = {task.make(s, i, 0).messages[0]["content"] for s in (Split.DEV, Split.TEST) for i in range(task.size(s))}
    assert not held_out & {d.argument for d in task.drills(random.Random(1), 400)}


@pytest.mark.parametrize(("name", "options", "message"), [
    ("nosuch", {}, "neither one of echo, gym, ledger"),
    ("nosuch:Thing", {}, "cannot be imported"),
    ("tidemill.agent.task:Nothing", {}, "has no Nothing"),
    ("tidemill.agent.tool:Bench", {}, "options"),
    ("no/such/file.py:Task", {}, "no file"),
    ("tidemill.agent.tools.python:PythonTool", {}, "not a tidemill.agent.task.Task"),
    ("ledger", {"nmaes": 3}, "nmaes"),
    ("ledger", {"names": 2}, "names = 2"),
])
def test_bad_task_names(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(name, options)


def test_task_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from tidemill.agent.task import Problem, Task\n"
        "class Mine(Task):\n"
        "    name = 'mine'\n"
        "    def __init__(self, *, n=3): self.n = n\n"
        "    def size(self, split): return self.n\n"
        "    def make(self, split, index, seed):\n"
        "        return Problem(problem_id=str(index), messages=(), answer=index)\n"
        "    def grade(self, problem, attempt): return attempt.answer == str(problem.answer)\n")
    task = load_task(f"{path}:Mine", {"n": 5})
    assert (task.name, task.size(Split.DEV), task.make(Split.DEV, 2, 0).answer) == ("mine", 5, 2)
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_task(f"{tmp_path / 'broken.py'}:Mine")


def test_tools_load_and_declare() -> None:
    assert declaration(load_tool("python"))["function"]["parameters"]["required"] == ["code"]
    assert declaration(load_tool("sh"))["function"]["name"] == "sh"
    with pytest.raises(ConfigError, match="lacks name"):
        load_tool("tidemill.agent.tool:ToolLimits")


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",))), st.integers(0, 40), st.booleans())
def test_cut_text(text: str, limit: int, missing: bool) -> None:
    shown, cut = cut_text(text, limit, missing=missing)
    assert len(shown.encode()) <= limit
    assert cut == (missing or len(text.encode()) > limit)
    assert cut or shown == text


def test_what_the_model_reads() -> None:
    limits = ToolLimits(timeout_s=2.0, output_bytes=200)

    def read(**fields: Any) -> tuple[str, bool]:
        known = {"exit_code": 0, "stdout": b"", "stderr": b"", "duration_ms": 1.0}
        shown = present(ExecResult(**known | fields), limits)
        return shown.text, shown.ok

    trace = b"Traceback (most recent call last):\n  File x\nZeroDivisionError: division by zero\n"
    assert read(stdout=b"5\n") == ("5", True)
    assert read(stdout=b"5\n", stderr=b"a warning\n") == ("5\na warning", True)
    assert read(exit_code=1, stderr=trace) == ("ZeroDivisionError: division by zero", False)
    assert read(exit_code=3) == ("error: exit code 3", False)
    assert read(exit_code=None, signal=9) == ("error: killed by signal 9", False)
    assert read(exit_code=None, stdout=b"y\n", timed_out=True) == ("y\nerror: stopped after 2 s", False)
    assert read(stdout=b"\xff\n") == ("\ufffd", True)
    assert present(None, limits).ok is False
