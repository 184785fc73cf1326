"""Where documents come from: text files, files of conversations, and tasks that generate them.

A source hands out training document number 0, 1, 2, ...: a pure function of the recipe, without end. What is held out
never comes up among them.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tidemill.agent.task import Demonstrator, Problem, Split, Task, Turn, load_task
from tidemill.agent.tool import declaration, load_tool
from tidemill.core.config import require, require_positive, strict_config
from tidemill.core.errors import ConfigError
from tidemill.model.chat.codec import ChatCodec
from tidemill.train.config import TaskSection
from tidemill.train.pretrain.documents import Document, conversation_document, text_document
from tidemill.train.pretrain.text_files import Reader, Span, digest_of, find_files, spans_of

BYTES_PER_TOKEN = 3
"""Excerpts of text have this many bytes for each token of the context, so that most fit it whole."""


@strict_config
@dataclass(frozen=True, kw_only=True)
class SourceSection:
    """One source: exactly one of `text`, `conversations` and `task`.

    text           glob patterns of files, see tidemill.train.pretrain.text_files; .jsonl rows have a field `text`
    conversations  glob patterns of .jsonl files, see tidemill.train.pretrain.documents
    task           a task whose train split is asked and answered
    """

    name: str
    weight: float
    """Its part of all tokens, relative to the other sources."""
    licence: str
    package: str = ""
    """What to install to have the data; for people."""
    text: tuple[str, ...] = ()
    conversations: tuple[str, ...] = ()
    task: TaskSection | None = None
    chain: int = 1
    """Of a task: problems in one conversation at most; fewer if they do not fit the context."""
    thinking: float = 1.0
    """Of a task: share of conversations with a think channel."""
    digest: str = ""
    """Of the documents; empty: not checked. A training on other data than this is refused."""

    def __post_init__(self) -> None:
        given = [bool(self.text), bool(self.conversations), self.task is not None]
        require(sum(given) == 1, field="data", value=self.name, expected="one of text, conversations and task")
        require_positive(self, "weight")
        require(self.chain >= 1, field="chain", value=self.chain, expected="at least 1")
        require(0 <= self.thinking <= 1, field="thinking", value=self.thinking, expected="a share from 0 to 1")
        require(bool(self.name and self.licence), field="data", value=self.name, expected="a name and a licence")


class Source(ABC):
    """Documents of one section."""

    def __init__(self, section: SourceSection) -> None:
        self.section = section

    @abstractmethod
    def document(self, number: int) -> Document:
        """Training document `number` (0 and up); they begin again after the last."""

    @abstractmethod
    def held_out(self) -> Iterator[HeldOut]:
        """Documents no training document is, in a fixed order."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What there is, for data.json."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A document, and how many bytes of text its learned tokens stand for; 0 if they are no plain text."""

    document: Document
    num_bytes: int


class FileSource(Source):
    """Excerpts or rows of files. Each pass over them has an order of its own."""

    def __init__(self, section: SourceSection, codec: ChatCodec, *, seed: int, held_out: float, context: int) -> None:
        """Raises ConfigError (no file, other data than the recipe's), InputError (a file that cannot be read)."""
        super().__init__(section)
        self._codec, self._seed, self._reader = codec, seed, Reader()
        files = find_files(section.text or section.conversations, field=f"data.{section.name}")
        spans = [s for path in files for s in spans_of(path, excerpt_bytes=context * BYTES_PER_TOKEN)]
        self.files, self.digest = len(files), digest_of(spans)
        if section.digest and section.digest != self.digest:
            raise ConfigError(f"data.{section.name}: the documents have digest {self.digest}, the recipe says "
                              f"{section.digest}", field=f"data.{section.name}.digest",
                              remedy=f"Install the version the recipe was made with ({section.package}), or take "
                                     f"what is here with --set 'data.{section.name}.digest=\"\"'.")
        parts: dict[bool, list[Span]] = {True: [], False: []}
        for span in spans:
            parts[_share(span.document) < held_out].append(span)
        self.train, self.kept_back = parts[False], sorted(parts[True], key=lambda s: s.document)
        if not self.train:
            raise ConfigError(f"data.{section.name}: no document to train on", field=f"data.{section.name}",
                              remedy="Its files are empty, or held_out takes all of them.")
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def document(self, number: int) -> Document:
        turn, place = divmod(number, len(self.train))
        return self._read(self.train[self._order(turn)[place]])

    def held_out(self) -> Iterator[HeldOut]:
        for span in self.kept_back:
            yield HeldOut(self._read(span), span.stop - span.start if self.section.text else 0)

    def texts(self, *, held_out: bool) -> Iterator[bytes]:
        """The excerpts as they are, for models of bytes."""
        for span in self.kept_back if held_out else self.train:
            yield self._reader.text(span).encode()

    def describe(self) -> dict[str, Any]:
        sizes = {name: sum(s.stop - s.start for s in spans)
                 for name, spans in (("train_bytes", self.train), ("held_out_bytes", self.kept_back))}
        return {"files": self.files, "digest": self.digest, **sizes, "train_documents": len(self.train),
                "held_out_documents": len(self.kept_back)}

    def _read(self, span: Span) -> Document:
        if self.section.conversations:
            return conversation_document(self._reader.row(span), self._codec, where=f"{span.path}, byte {span.start}")
        if span.path.suffix != ".jsonl":
            return text_document(self._reader.text(span), self._codec.vocabulary, is_end=span.is_end)
        text = self._reader.row(span).get("text")
        if not isinstance(text, str):
            raise ConfigError(f"{span.path}: the row at byte {span.start} has no field text", field=str(span.path))
        return text_document(text, self._codec.vocabulary, is_end=True)

    def _shuffled(self, turn: int) -> list[int]:
        order = list(range(len(self.train)))
        random.Random(f"{self._seed}/{self.section.name}/{turn}").shuffle(order)
        return order


class TaskSource(Source):
    """Problems of a task's train split with the answers an expert gives; held out are those of its dev split."""

    def __init__(self, section: SourceSection, codec: ChatCodec, *, seed: int, context: int) -> None:
        super().__init__(section)
        assert section.task is not None
        self._codec, self._seed, self._context = codec, seed, context
        self.task = load_task(section.task.name, section.task.options)
        tools = [load_tool(name) for name in self.task.tools]
        self._tools = [declaration(tool) for tool in tools] if self.task.declare_tools else []

    def document(self, number: int) -> Document:
        return self._conversation(Split.TRAIN, number)

    def held_out(self) -> Iterator[HeldOut]:
        for number in range(self.task.size(Split.DEV) // self.section.chain):
            yield HeldOut(self._conversation(Split.DEV, number), 0)

    def describe(self) -> dict[str, Any]:
        return {"task": self.task.name, "splits": {s.value: self.task.size(s) for s in Split}}

    def _conversation(self, split: Split, number: int) -> Document:
        """Up to `chain` problems, as many as fit the context; one that does not fit alone is cut like any document."""
        rng = random.Random(f"{self._seed}/{self.section.name}/{split}/{number}")
        count, thinking = rng.randint(1, self.section.chain), rng.random() < self.section.thinking
        messages: list[Any] = []
        fitting: Document | None = None
        for index in range(number * self.section.chain, number * self.section.chain + count):
            problem = self.task.make(split, index, self._seed)
            asked = [m for m in problem.messages if not messages or m["role"] != "system"]
            messages += [*asked, *answered(_turns(self.task, problem), first_call=len(messages))]
            row = {"messages": messages, "tools": self._tools, "thinking": thinking}
            document = conversation_document(row, self._codec, where=f"task {self.task.name}")
            if fitting is not None and len(document.ids) > self._context:
                break
            fitting = document
        assert fitting is not None
        return fitting


def _turns(task: Task, problem: Problem) -> Sequence[Turn]:
    """The expert's; a task without demonstrations is answered at once."""
    return task.demonstrate(problem) if isinstance(task, Demonstrator) else (Turn(answer=str(problem.answer)),)


def answered(turns: Sequence[Turn], *, first_call: int = 0) -> list[dict[str, Any]]:
    """Turns as chat messages, tool results included; call ids count from `first_call`."""
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, first_call):
        if not turn.tool:
            messages.append({"role": "assistant", "content": turn.answer})
            continue
        call = {"id": f"call_{number}", "type": "function",
                "function": {"name": turn.tool, "arguments": dict(turn.arguments)}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "name": turn.tool, "content": turn.result})
    return messages


def open_source(section: SourceSection, codec: ChatCodec, *, seed: int, held_out: float, context: int) -> Source:
    """The source a section describes."""
    if section.task is not None:
        return TaskSource(section, codec, seed=seed, context=context)
    return FileSource(section, codec, seed=seed, held_out=held_out, context=context)


def _share(digest: str) -> float:
    """A digest as a number in [0, 1)."""
    return int(digest.removeprefix("sha256:")[:16], 16) / 2**64
