"""What a task is: problems with known answers, split into train, dev and test, and a grader.

A task knows nothing of engines, sandboxes or tokens, except that it may offer demonstrations (`Demonstrator`) for a
supervised warm-up. Splits are disjoint by construction: a prompt belongs to the split its canonical key hashes to.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from tidemill.agent.registry import construct, load_object
from tidemill.agent.tool import ToolCall
from tidemill.core.config import require
from tidemill.core.errors import ConfigError
from tidemill.core.sandbox_api import Sandbox

Message = Mapping[str, Any]
"""A chat message in OpenAI's shape: role, content, and for tools tool_calls or tool_call_id."""


class Split(StrEnum):
    """Train is sampled during training, dev decides when to stop, test is looked at twice."""

    TRAIN = "train"
    DEV = "dev"
    TEST = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the harness does inside the sandbox before the episode; the model never sees it.

    code   run in a live session, by kind (`python`, `sh`); the episode's tools use the same sessions
    files  written first, by path
    """

    code: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question. Two problems with equal `problem_id` are equal in everything."""

    problem_id: str
    messages: tuple[Message, ...]
    answer: Any
    setup: Setup | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a grader says. `reward` enters training, `correct` enters accuracy."""

    reward: float
    correct: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a grader sees.

    answer    text of the last response channel
    complete  the policy ended its answer itself; False if a limit cut it
    messages  the whole conversation, the problem's messages included
    sandbox   still as the episode left it, only for tasks with `grades_in_sandbox`
    """

    answer: str
    complete: bool
    messages: tuple[Message, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    sandbox: Sandbox | None = None


Grade = Verdict | float | bool
"""A bare number is the reward, and correct if it is at least 1; a bool is reward 1 or 0."""


class Task(ABC):
    """Base class of tasks. Subclasses set `name`, and override `make`, `size` and `grade`."""

    name: str = ""
    tools: tuple[str, ...] = ()
    """Names of the tools the policy may call, built in or `module:object`. Empty: no sandbox is used."""
    needs_sandbox: bool = True
    """The tools run in a sandbox. False: they compute their results themselves, and no sandbox is started."""
    declare_tools: bool = True
    """Write the tools' descriptions into the prompt."""
    words: tuple[str, ...] = ()
    """Words that a tokenizer trained for this task alone should hold as single tokens."""
    grades_inline: bool = False
    """`grade` is plain code that always returns at once: it runs on the event loop, not in a thread of its own, which
    would cost milliseconds beside a busy engine thread. A grader that could hang must leave this False."""
    grades_in_sandbox: bool = False
    """The grader looks into the sandbox, so the episode keeps it until then."""

    @abstractmethod
    def size(self, split: Split) -> int:
        """Distinct prompts of a split."""

    @abstractmethod
    def make(self, split: Split, index: int, seed: int) -> Problem:
        """Prompt number index modulo size; `seed` decides what else is random. Pure: same arguments, same problem."""

    @abstractmethod
    def grade(self, problem: Problem, attempt: Attempt) -> Grade | Awaitable[Grade]:
        """Judge an attempt. May be a coroutine function. Raising, hanging or NaN makes the episode an infrastructure
        error, never a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One demonstrated assistant turn: either a tool call with the result it would really get, or the final answer."""

    answer: str = ""
    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    result: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A fragment of an episode that exercises one copy: given messages, then what the policy writes.

    Exactly one of `argument` (the value of tool's argument `key`) and `answer` is set.
    """

    messages: tuple[Message, ...]
    tool: str = ""
    key: str = ""
    argument: str = ""
    answer: str = ""


@runtime_checkable
class Demonstrator(Protocol):
    """A task that can show how it is done, without engine or sandbox."""

    def demonstrate(self, problem: Problem) -> Sequence[Turn]:
        """The expert's turns, the last one an answer."""
        ...

    def drills(self, rng: random.Random, count: int) -> Sequence[Drill]:
        """Short exercises of what demonstrations are made of; may be empty."""
        ...


@runtime_checkable
class Teacher(Protocol):
    """A task whose warm-up shows something less than the expert, so that reinforcement has something to find."""

    def teach(self, problem: Problem, rng: random.Random) -> Sequence[Turn]:
        """Turns of an imperfect teacher."""
        ...


class SplitRule:
    """Which split a key belongs to: SHA-256 of salt and key as a fraction, test first, then dev, the rest train."""

    def __init__(self, *, test: float, dev: float, salt: str = "") -> None:
        require(0 <= test <= 1 and 0 <= dev <= 1 and test + dev <= 1, field="test, dev", value=(test, dev),
                expected="shares that add up to at most 1")
        self._test, self._dev, self._salt = test, dev, salt

    def split(self, key: str) -> Split:
        """The split of a canonical key."""
        digest = hashlib.sha256(f"{self._salt}\0{key}".encode()).digest()
        share = int.from_bytes(digest[:8], "big") / 2**64
        if share < self._test:
            return Split.TEST
        return Split.DEV if share < self._test + self._dev else Split.TRAIN

    def partition(self, prompts: Iterable[tuple[str, Any]]) -> dict[Split, list[Any]]:
        """(key, prompt) pairs into splits, each in an order that follows from the salt alone."""
        parts: dict[Split, list[tuple[bytes, str, Any]]] = {s: [] for s in Split}
        for number, (key, prompt) in enumerate(prompts):
            order = hashlib.sha256(f"order\0{self._salt}\0{key}\0{number}".encode()).digest()
            parts[self.split(key)].append((order, key, prompt))
        return {s: [p for _, _, p in sorted(rows, key=lambda r: r[:2])] for s, rows in parts.items()}


TASKS: dict[str, str] = {
    "ledger": "tidemill.agent.tasks.ledger:LedgerTask",
    "gym": "tidemill.agent.tasks.gym:GymTask",
    "toolbox": "tidemill.agent.tasks.toolbox:ToolboxTask",
    "echo": "tidemill.agent.tasks.echo:EchoTask",
}
"""Tasks that come with the package. Anything else is named `module:object` or `file.py:object`."""


def load_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """A task by name, made with options. Raises ConfigError (unknown name, option or split without prompts)."""
    task = construct(load_object(name, TASKS, kind="task"), options or {}, kind="task", name=name)
    if not isinstance(task, Task):
        raise ConfigError(f"task = {name!r}: a {type(task).__name__}, not a tidemill.agent.task.Task", field="task")
    return task
