"""Toolbox: requests that one call of a small tool answers (calculator, text, files), and some that need no tool.

    user       Reverse the text "cedar 41".
    assistant  calls text with operation `reverse`, text `cedar 41`
    tool       14 radec
    assistant  14 radec

The tools need no sandbox. Requests are drawn by code; one belongs to the split its text hashes to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.agent.task import Attempt, Drill, Problem, Split, SplitRule, Task, Turn, Verdict
from tidemill.agent.tasks.phrases import NOUNS, number, phrase, word
from tidemill.agent.tools.toolbox import OPERATIONS, calculate, listing, note

SIZES = {Split.TRAIN: 1_000_000, Split.DEV: 4096, Split.TEST: 4096}
WITHOUT_TOOL = 0.15
"""Share of requests that are answered at once."""

_FOLDERS = ("notes", "docs", "data", "logs", "work")
_GREETINGS = {
    "Hello!": "Hello.", "Hi.": "Hello.", "Good morning.": "Good morning.", "Good evening.": "Good evening.",
    "Thank you.": "You are welcome.", "Thanks!": "You are welcome.", "Goodbye.": "Goodbye.",
    "Who are you?": "I am nano, a small test model.", "What are you?": "I am nano, a small test model.",
    "What can you do?": "I can call a calculator, a text tool and a files tool.",
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request, the call that answers it (none: `tool` empty), the call's result, and the answer."""

    prompt: str
    answer: str
    tool: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict[str, str])
    result: str = ""


class ToolboxTask(Task):
    """An answer is correct if it is the expected one and the expected call was made."""

    name = "toolbox"
    tools = ("calculator", "text", "files")
    needs_sandbox = False
    grades_inline = True

    def __init__(self) -> None:
        self._rule = SplitRule(test=0.1, dev=0.1, salt="toolbox")

    def size(self, split: Split) -> int:
        return SIZES[split]

    def make(self, split: Split, index: int, seed: int) -> Problem:
        rng = random.Random(f"toolbox/{split}/{index % SIZES[split]}/{seed}")
        while self._rule.split((request := draw(rng)).prompt) is not split:
            pass
        return Problem(problem_id=f"{split}-{index % SIZES[split]}-{seed}",
                       messages=({"role": "user", "content": request.prompt},), answer=request.answer,
                       metadata={"request": request})

    def grade(self, problem: Problem, attempt: Attempt) -> Verdict:
        wanted: Request = problem.metadata["request"]
        called = [(call.tool, dict(call.arguments)) for call in attempt.tool_calls]
        expected = [(wanted.tool, dict(wanted.arguments))] if wanted.tool else []
        right = attempt.complete and called == expected and attempt.answer.strip() == wanted.answer.strip()
        return Verdict(reward=float(right), correct=right, detail=f"expected {expected} and {wanted.answer!r}")

    def demonstrate(self, problem: Problem) -> Sequence[Turn]:
        request: Request = problem.metadata["request"]
        answer = Turn(answer=request.answer)
        if not request.tool:
            return (answer,)
        return Turn(tool=request.tool, arguments=request.arguments, result=request.result), answer

    def drills(self, rng: random.Random, count: int) -> Sequence[Drill]:
        """None: whole requests are short."""
        return ()


def draw(rng: random.Random) -> Request:
    """One request."""
    if rng.random() < WITHOUT_TOOL:
        return _without_tool(rng)
    return rng.choice(_KINDS)(rng)


def _calculator(rng: random.Random) -> Request:
    expression = _expression(rng)
    prompt = rng.choice(("What is {}?", "Calculate {}.", "Compute {}.", "How much is {}?", "{} = ?"))
    value = calculate(expression)
    return Request(prompt.format(expression), value, "calculator", {"expression": expression}, value)


def _expression(rng: random.Random) -> str:
    text = str(number(rng))
    for _ in range(rng.choice((1, 1, 2))):
        text += f" {rng.choice('+-*')} {number(rng)}"
    return text


_TEXT_PROMPTS: Mapping[str, Sequence[str]] = {
    "upper": ('Write "{}" in capital letters.', 'Make "{}" upper case.'),
    "lower": ('Write "{}" in small letters.', 'Make "{}" lower case.'),
    "reverse": ('Reverse the text "{}".', 'Write "{}" backwards.'),
    "length": ('How many characters has "{}"?', 'How long is the text "{}"?'),
    "words": ('How many words are in "{}"?', 'Count the words of "{}".'),
}


def _text(rng: random.Random) -> Request:
    operation = rng.choice(tuple(OPERATIONS))
    text = phrase(rng)
    if operation == "lower":
        text = text.upper() if rng.random() < 0.5 else text.title()
    result = OPERATIONS[operation](text)
    return Request(rng.choice(_TEXT_PROMPTS[operation]).format(text), result, "text",
                   {"operation": operation, "text": text}, result)


def _files(rng: random.Random) -> Request:
    folder = rng.choice(_FOLDERS)
    if rng.random() < 0.2:
        folder += f"/{rng.choice(NOUNS)}"
        result = listing(folder)
        prompt = rng.choice(("List the files in {}.", "Which files are in {}?")).format(folder)
        return Request(prompt, result, "files", {"action": "list", "path": folder}, result)
    path = f"{folder}/{word(rng)}.txt"
    if rng.random() < 0.5:
        result = note(path)
        prompt = rng.choice(("What does {} say?", "Read {}.", "Show me the file {}.")).format(path)
        return Request(prompt, result, "files", {"action": "read", "path": path}, result)
    content = phrase(rng)
    prompt = rng.choice(('Save "{}" to {}.', 'Write "{}" into the file {}.')).format(content, path)
    return Request(prompt, "Done.", "files", {"action": "write", "path": path, "content": content}, "saved")


def _without_tool(rng: random.Random) -> Request:
    if rng.random() < 0.5:
        greeting, answer = rng.choice(tuple(_GREETINGS.items()))
        return Request(f"My name is {word(rng)}. {greeting}", answer)
    said = phrase(rng)
    return Request(rng.choice(("Say: {}", "Repeat after me: {}")).format(said), said)


_KINDS: tuple[Callable[[random.Random], Request], ...] = (_calculator, _text, _files)
