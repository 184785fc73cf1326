"""One episode: a problem, a policy behind an engine session, tools at a bench, a verdict. Reads like a script.

What the policy does wrong is its own affair (a wrong answer, an error for it to read); what engine, sandbox or grader
do wrong ends the episode as INFRA_ERROR with the reason, and never as a reward of zero.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidemill.agent.grading import grade
from tidemill.agent.loan import BenchLoan
from tidemill.agent.pool import SandboxPool
from tidemill.agent.scaffold import Scaffold, Slot
from tidemill.agent.task import Attempt, Message, Problem, Task, Verdict
from tidemill.agent.tool import Tool, ToolCall, ToolLimits, invoke, refusal
from tidemill.core.engine_api import Completion, EngineClient, FinishReason, GenerateRequest, SamplingParams
from tidemill.core.errors import EngineError, TidemillError
from tidemill.core.outcomes import Outcome
from tidemill.core.token_log import TokenLog
from tidemill.model.chat.codec import ChatOptions
from tidemill.model.chat.messages import parse_messages
from tidemill.model.chat.parser import MalformedCall, ParsedCall


class EpisodeSettings(Protocol):
    """Limits of an episode (a recipe's `agent` section fits)."""

    @property
    def scaffold(self) -> str: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def max_sampled_tokens(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def tool_timeout_s(self) -> float: ...
    @property
    def tool_output_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Random numbers of one episode: tokens depend on (seed, sequence, position) only."""

    seed: int
    sequence: int
    temperature: float


@dataclass(slots=True, kw_only=True)
class Episode:
    """What happened. `reward` is None exactly when the outcome is INFRA_ERROR."""

    problem_id: str
    log: TokenLog
    outcome: Outcome
    reward: float | None
    answer: str
    verdict: Verdict | None = None
    turns: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    error: str = ""
    seconds: float = 0.0
    generate_s: float = 0.0
    """Part of `seconds` spent waiting for the policy."""
    usage: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tokens as an endpoint counts them; an engine's are in `log`."""

    def to_json(self) -> dict[str, Any]:
        """One row of an episode file."""
        return {
            "problem_id": self.problem_id, "outcome": self.outcome.value, "reward": self.reward,
            "answer": self.answer, "detail": self.verdict.detail if self.verdict else "", "turns": self.turns,
            "tool_calls": [{"tool": c.tool, "arguments": dict(c.arguments), "result": c.result.text, "ok": c.result.ok,
                            "ms": round(c.duration_s * 1e3, 3)} for c in self.tool_calls],
            "error": self.error, "seconds": round(self.seconds, 4), "generate_s": round(self.generate_s, 4),
            **self.log.to_json(),
        }


@dataclass(kw_only=True)
class Harness:
    """What all episodes of a task share."""

    engine: EngineClient
    task: Task
    tools: Sequence[Tool]
    scaffold: Scaffold
    settings: EpisodeSettings
    pool: SandboxPool | None = None
    grade_timeout_s: float = 10.0

    @property
    def limits(self) -> ToolLimits:
        return ToolLimits(timeout_s=self.settings.tool_timeout_s, output_bytes=self.settings.tool_output_bytes)


class _Truncated(Exception):  # noqa: N818 - control flow within this file
    """A limit was reached. Carries the answer as far as it got."""

    def __init__(self, answer: str = "") -> None:
        super().__init__(answer)
        self.answer = answer


class _Stray(Exception):  # noqa: N818 - control flow within this file
    """The policy left the grammar in its answer, where no tool result can tell it so."""


async def run_episode(harness: Harness, problem: Problem, draw: Draw, *, episode_id: str) -> Episode:
    """Run one episode to its end. Raises only what is a bug or a cancellation; every failure is an outcome."""
    started = time.perf_counter()
    attempt = _Attempt(harness, problem, draw, episode_id)
    try:
        episode = await attempt.run()
    except TidemillError as e:
        episode = attempt.failed(e)
    finally:
        await attempt.close()
    episode.seconds, episode.generate_s = time.perf_counter() - started, attempt.generate_s
    return episode


@dataclass
class _Attempt:
    """The moving parts of one episode."""

    harness: Harness
    problem: Problem
    draw: Draw
    episode_id: str
    log: TokenLog = field(default_factory=TokenLog)
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    messages: list[Message] = field(default_factory=list[Message])
    turns: int = 0
    generate_s: float = 0.0
    _given: list[int] = field(default_factory=list[int])
    """Tokens given since the engine last heard of the session."""
    _requests: int = 0
    _opened: bool = False

    def __post_init__(self) -> None:
        self._loan = BenchLoan(self.harness.pool, self.problem, self.harness.limits)

    async def run(self) -> Episode:
        self.messages = list(self.problem.messages)
        await self.harness.engine.open_session(self.episode_id)
        self._opened = True
        answer, complete = "", True
        truncated = False
        try:
            if self.harness.settings.scaffold == "forced":
                answer = await self._forced()
            else:
                answer = await self._free()
        except _Truncated as cut:
            answer, complete, truncated = cut.answer, False, True
        except _Stray:
            complete = False
        return await self._graded(answer, complete=complete, truncated=truncated)

    async def _graded(self, answer: str, *, complete: bool, truncated: bool) -> Episode:
        task = self.harness.task
        bench = None
        if task.grades_in_sandbox:
            bench = await self._loan.get()
        else:
            self._loan.give_back()
        attempt = Attempt(answer=answer, complete=complete, messages=tuple(self.messages), tool_calls=tuple(self.calls),
                          sandbox=bench.sandbox if bench else None)
        verdict = await grade(task, self.problem, attempt, timeout_s=self.harness.grade_timeout_s)
        outcome = Outcome.TRUNCATED if truncated else Outcome.OK if verdict.correct else Outcome.WRONG
        return Episode(problem_id=self.problem.problem_id, log=self.log, outcome=outcome, reward=verdict.reward,
                       answer=answer, verdict=verdict, turns=self.turns, tool_calls=tuple(self.calls))

    def failed(self, error: TidemillError) -> Episode:
        """The episode an infrastructure failure leaves."""
        return Episode(problem_id=self.problem.problem_id, log=self.log, outcome=Outcome.INFRA_ERROR, reward=None,
                       answer="", turns=self.turns, tool_calls=tuple(self.calls),
                       error=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Give back sandbox and session; idempotent. A closing that fails has nothing left to spoil."""
        await self._loan.close()
        if self._opened:
            self._opened = False
            with suppress(TidemillError):
                await self.harness.engine.close_session(self.episode_id)

    # -- forced scaffold -------------------------------------------------------------------------------------------

    async def _forced(self) -> str:
        s = self.harness.scaffold
        self._give(s.prompt(self.problem))
        for turn in range(1, self.harness.settings.max_turns + 1):
            self.turns = turn
            self._give(s.turn())
            response = await self._slot(s.close_id, is_answer=True)
            if response.stray:
                raise _Stray
            if response.text or not self.harness.tools:
                self._give(s.end_answer())
                self.messages.append({"role": "assistant", "content": response.text})
                return response.text
            if turn == self.harness.settings.max_turns:
                break
            await self._forced_call()
            if turn + 1 == self.harness.settings.max_turns and not self.harness.task.grades_in_sandbox:
                # No later turn can call again: the sandbox is given back at once.
                self._loan.give_back()
        raise _Truncated

    async def _forced_call(self) -> None:
        """One tool call. What the policy gets wrong in it is answered with an error for it to read."""
        s = self.harness.scaffold
        self._loan.want()
        self._give(s.begin_call())
        named = await self._slot(s.quote_id)
        name, arguments, problem = named.text, dict[str, Any](), "malformed call" if named.stray else ""
        tool = s.tools.get(name)
        if problem:
            self._give(s.end_call())
        elif tool is None:
            problem = f"no tool {name}"
            self._give(s.end_call(without_arguments=True))
        else:
            slots = s.parameters(tool)
            for number, (key, kind) in enumerate(slots):
                self._give(s.begin_argument(key, kind, first=number == 0))
                value = await self._slot(s.close_id)
                if value.stray:
                    problem = "malformed call"
                    break
                arguments[key] = _typed(value.text, kind)
                self._give(s.end_argument())
            self._give(s.end_call(without_arguments=not slots))
        if problem or tool is None:
            call = ToolCall(tool=name, arguments=arguments, result=refusal(problem), duration_s=0.0, error=problem)
        else:
            call = await invoke(tool, arguments, await self._loan.get())
        self._answered(name, arguments, call)

    def _answered(self, name: str, arguments: Mapping[str, Any], call: ToolCall) -> None:
        self._note(call)
        call_id = f"call_{len(self.calls)}"
        function = {"name": name, "arguments": json.dumps(dict(arguments), ensure_ascii=False)}
        self.messages.append({"role": "assistant", "content": "",
                              "tool_calls": [{"id": call_id, "type": "function", "function": function}]})
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": call.result.text})
        self._give(self.harness.scaffold.result(name, call.result.text))

    async def _slot(self, end_id: int, *, is_answer: bool = False) -> Slot:
        """Let the policy fill a slot. Raises _Truncated if a limit ends it."""
        s = self.harness.scaffold
        ids = await self._sample(s.stops(end_id))
        slot = s.read(ids, end_id)
        if not slot.ended and not slot.stray:
            raise _Truncated(slot.text if is_answer else "")
        return slot

    # -- free scaffold ---------------------------------------------------------------------------------------------

    async def _free(self) -> str:
        """The policy writes whole turns; only the generation prefix is given."""
        codec = self.harness.scaffold.codec
        prefix = codec.encode(codec.generation_prefix(thinking=True))
        self._give(self.harness.scaffold.prompt(self.problem))
        for turn in range(1, self.harness.settings.max_turns + 1):
            self.turns = turn
            self._give(prefix)
            ids = await self._sample(codec.stop_ids)
            parser = codec.parser(thinking=True)
            parser.push(ids)
            parser.finish()
            parsed = parser.message
            if not parsed.complete:
                raise _Truncated(parsed.content)
            if not parsed.calls:
                self.messages.append({"role": "assistant", "content": parsed.content})
                return parsed.content
            if turn == self.harness.settings.max_turns:
                break
            self._loan.want()
            await self._free_calls(parsed.content, parsed.calls)
        raise _Truncated

    async def _free_calls(self, content: str, calls: Sequence[ParsedCall | MalformedCall]) -> None:
        rows: list[Message] = []
        listed: list[dict[str, Any]] = []
        for call in calls:
            tool = self.harness.scaffold.tools.get(call.name)
            arguments = dict(call.arguments) if isinstance(call, ParsedCall) else {}
            if tool is None or isinstance(call, MalformedCall):
                reason = call.problem if isinstance(call, MalformedCall) else f"no tool {call.name}"
                done = ToolCall(tool=call.name, arguments=arguments, result=refusal(reason), duration_s=0.0,
                                error=reason)
            else:
                done = await invoke(tool, arguments, await self._loan.get())
            self._note(done)
            call_id = f"call_{len(self.calls)}"
            function = {"name": call.name or "unknown", "arguments": json.dumps(arguments, ensure_ascii=False)}
            listed.append({"id": call_id, "type": "function", "function": function})
            rows.append({"role": "tool", "tool_call_id": call_id, "name": call.name or "unknown",
                         "content": done.result.text})
        self.messages.append({"role": "assistant", "content": content, "tool_calls": listed})
        self.messages += rows
        codec = self.harness.scaffold.codec
        options = ChatOptions(generation_prefix=False)
        self._give(codec.prompt_ids(parse_messages(rows), options))

    # -- engine and sandbox ----------------------------------------------------------------------------------------

    def _give(self, ids: Sequence[int]) -> None:
        self.log.give(ids)
        self._given.extend(ids)

    async def _sample(self, stops: tuple[int, ...]) -> tuple[int, ...]:
        """Sample until a stop; the session then holds everything up to it. Raises _Truncated, EngineError."""
        settings = self.harness.settings
        left = min(settings.max_sampled_tokens - self.log.num_sampled, settings.max_model_len - len(self.log))
        if left <= 0:
            raise _Truncated
        self._requests += 1
        params = SamplingParams(max_tokens=left, temperature=self.draw.temperature, seed=self.draw.seed,
                                sequence=self.draw.sequence, stop_token_ids=stops)
        started = time.perf_counter()
        done: Completion = await self.harness.engine.generate(GenerateRequest(
            request_id=f"{self.episode_id}.{self._requests}", ids=tuple(self._given), sampling=params,
            session_id=self.episode_id))
        self.generate_s += time.perf_counter() - started
        if done.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise EngineError(done.error or f"request ended with {done.finish_reason.value}")
        if done.prompt_tokens != len(self.log):
            raise EngineError(f"session {self.episode_id}: the engine holds {done.prompt_tokens} given tokens, the log "
                              f"{len(self.log)}")
        self._given.clear()
        self.log.sample(done.ids, done.logprobs, done.versions)
        return done.ids

    def _note(self, call: ToolCall) -> None:
        self.calls.append(call)
        if self.harness.pool is not None and not call.error:
            self.harness.pool.stats.note_tool(call.duration_s)


def _typed(text: str, kind: str) -> Any:
    """A slot's text as the value its parameter wants; the text itself if it is no such value."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
