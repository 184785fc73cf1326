"""Every way an episode can end, and what it leaves behind: nothing."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from tidemill.agent.episode import Draw, Episode, run_episode
from tidemill.agent.pool import SandboxPool
from tidemill.agent.task import Attempt, Problem, Split, Task, Verdict
from tidemill.agent.tool import Bench, Effect, ToolLimits, ToolResult
from tidemill.core.errors import EngineError, NonFiniteError, SandboxError
from tidemill.core.outcomes import Outcome

DRAW = Draw(seed=1, sequence=2, temperature=1.0)


def play(stage: Any, *, problem: Problem | None = None, **changes: Any) -> tuple[Episode, Any]:
    """One ledger episode with a pool of one; afterwards no session, no sandbox."""
    async def main() -> tuple[Episode, Any]:
        limits = ToolLimits(timeout_s=0.5, output_bytes=stage.settings.tool_output_bytes)
        async with SandboxPool(stage.service, size=1, lease="test", sessions=("python",), limits=limits) as pool:
            harness = stage.harness(pool, **changes)
            episode = await run_episode(harness, problem or stage.task.make(Split.DEV, 0, 7), DRAW, episode_id="e")
            await pool.settle()
            assert pool.lent == 0
            assert pool.free == 1
        assert harness.engine.sessions == {}
        return episode, harness

    result = asyncio.run(main())
    assert stage.service.alive == set()
    return result


def on_value(stage: Any, value: str | list[int]) -> Any:
    """The right policy, but with this in the argument slot."""
    right = stage.harness().engine.policy
    close = stage.codec.vocabulary.control.close
    ids = [*stage.codec.encode([value]), close] if isinstance(value, str) else value

    def policy(text: str, request: Any) -> Any:
        return ids if text.endswith('type="string"<|sep|>') else right(text, request)

    return policy


def test_right_answer_through_the_tool(stage: Any) -> None:
    episode, harness = play(stage)
    problem = stage.task.make(Split.DEV, 0, 7)
    assert (episode.outcome, episode.reward, episode.turns) == (Outcome.OK, 1.0, 2)
    assert episode.answer == problem.answer == episode.tool_calls[0].result.text
    assert episode.tool_calls[0].arguments == {"code": problem.metadata["prompt"]}
    assert episode.log.num_sampled <= 48
    assert len(episode.log) <= 130
    assert {v for v, s in zip(episode.log.versions, episode.log.sampled, strict=True) if s} == {3}
    sent = [i for r in harness.engine.requests for i in r.ids]
    given = [i for i, s in zip(episode.log.ids, episode.log.sampled, strict=True) if not s]
    assert given[: len(sent)] == sent, "tokens given to the engine are the log's, in order"


def test_demonstration_is_what_a_right_policy_does(stage: Any) -> None:
    problem = stage.task.make(Split.DEV, 5, 9)
    episode, harness = play(stage, problem=problem)
    shown = harness.scaffold.demonstration(problem, stage.task.demonstrate(problem))
    assert (episode.log.ids, episode.log.sampled) == (shown.ids, shown.sampled)


def test_forced_tokens_read_back_as_the_grammar(stage: Any) -> None:
    episode, harness = play(stage)
    prefix = stage.codec.encode(stage.codec.generation_prefix(thinking=True))
    start = len(harness.scaffold.prompt(stage.task.make(Split.DEV, 0, 7)))
    assert episode.log.ids[start : start + len(prefix)] == prefix
    parser = stage.codec.parser(thinking=True)
    parser.push(episode.log.ids[start + len(prefix) :])
    assert parser.message.complete
    assert [dict(c.arguments) for c in parser.message.tool_calls] == [dict(episode.tool_calls[0].arguments)]
    assert parser.message.deviations == ()


def test_wrong_answer_without_the_tool(stage: Any) -> None:
    stage.policy = lambda text, request: [*stage.codec.encode(["1000"]), stage.codec.vocabulary.control.close]
    episode, _ = play(stage)
    assert (episode.outcome, episode.reward, episode.answer, episode.tool_calls) == (Outcome.WRONG, 0.0, "1000", ())
    assert episode.error == ""


@pytest.mark.parametrize(("value", "shown", "ok"), [
    ("nosuchname", "NameError: name 'nosuchname' is not defined", False),
    ("1+", "SyntaxError", False),
    ("forever", "stopped after", False),
    ("rubbish", "\ufffd\ufffd ok", True),
    ("x = 1", "", True),
    ("'y' * 500", "[cut]", True),
])
def test_what_code_does_is_a_result_and_the_episode_goes_on(stage: Any, value: str, shown: str, ok: bool) -> None:
    stage.policy = on_value(stage, value)
    stage.settings = replace(stage.settings, max_model_len=512, max_sampled_tokens=400, tool_output_bytes=120)
    episode, _ = play(stage)
    result = episode.tool_calls[0].result
    assert episode.outcome is (Outcome.WRONG if shown else Outcome.TRUNCATED), "the oracle repeats what it reads"
    assert episode.turns == 2
    assert result.ok is ok
    assert shown in result.text if shown != "stopped after" else result.timed_out
    assert len(result.text.encode()) <= 120


def test_unknown_tool_and_malformed_call_are_told_to_the_policy(stage: Any) -> None:
    right = stage.harness().engine.policy
    control = stage.codec.vocabulary.control
    stage.settings = replace(stage.settings, max_model_len=256)
    names = stage.codec.encode(["sh", '"'])
    for named, told in ((names, "error: no tool sh"), ([control.sep], "error: malformed call")):
        stage.policy = lambda text, request, named=named: named if text.endswith('tool="') else right(text, request)
        episode, _ = play(stage)
        assert (episode.outcome, episode.turns) == (Outcome.WRONG, 2)
        assert episode.tool_calls[0].result.text == told
        assert stage.codec.describe(episode.log.ids).count(told) == 2, "as the result, and copied as the answer"
    stage.policy = on_value(stage, [*stage.codec.encode(["1"]), control.open])
    episode, _ = play(stage)
    assert episode.tool_calls[0].error == "malformed call"
    assert episode.outcome is Outcome.WRONG


def test_marker_in_the_answer_is_wrong(stage: Any) -> None:
    stage.policy = lambda text, request: [*stage.codec.encode(["7"]), stage.codec.vocabulary.control.sep]
    episode, _ = play(stage)
    assert (episode.outcome, episode.reward) == (Outcome.WRONG, 0.0)


def test_limits_truncate(stage: Any) -> None:
    talk = stage.codec.encode(["7"]) * 400
    stage.policy = lambda text, request: talk
    episode, _ = play(stage)
    assert (episode.outcome, episode.log.num_sampled, episode.answer) == (Outcome.TRUNCATED, 48, "7" * 48)
    assert episode.reward == 0.0
    stage.settings = replace(stage.settings, max_model_len=40, max_sampled_tokens=400)
    episode, _ = play(stage)
    assert (episode.outcome, len(episode.log)) == (Outcome.TRUNCATED, 40)
    stage.settings = replace(stage.settings, max_model_len=10)
    episode, harness = play(stage)
    assert (episode.outcome, episode.log.num_sampled, harness.engine.requests) == (Outcome.TRUNCATED, 0, [])
    stage.settings = replace(stage.settings, max_model_len=192, max_turns=1)
    stage.policy = None
    episode, _ = play(stage)
    assert (episode.outcome, episode.tool_calls) == (Outcome.TRUNCATED, ())


@pytest.mark.parametrize("error", [EngineError("engine fell over"), NonFiniteError("a logit is not finite")])
def test_engine_failure_is_infrastructure(stage: Any, error: Exception) -> None:
    right = stage.harness().engine.policy
    stage.policy = lambda text, request: error if text.endswith('tool="') else right(text, request)
    episode, _ = play(stage)
    assert (episode.outcome, episode.reward, episode.verdict) == (Outcome.INFRA_ERROR, None, None)
    assert not episode.outcome.trains
    assert str(error) in episode.error


def test_log_that_differs_from_the_engines_is_infrastructure(stage: Any) -> None:
    harness = stage.harness()
    generate = harness.engine.generate

    async def short(request: Any) -> Any:
        done = await generate(request)
        return replace(done, prompt_tokens=done.prompt_tokens - 1)

    harness.engine.generate = short
    episode, _ = play(stage, engine=harness.engine)
    assert episode.outcome is Outcome.INFRA_ERROR
    assert "given tokens" in episode.error


def test_sandbox_failures_are_infrastructure(stage: Any) -> None:
    stage.policy = on_value(stage, "die")
    episode, _ = play(stage)
    assert episode.outcome is Outcome.INFRA_ERROR
    assert "SandboxDiedError" in episode.error
    stage.policy = None
    problem = stage.task.make(Split.DEV, 0, 7)
    broken = replace(problem, setup=replace(problem.setup, code={"python": "oak = missing"}))
    episode, _ = play(stage, problem=broken)
    assert episode.outcome is Outcome.INFRA_ERROR
    assert "setup of problem" in episode.error
    assert "NameError" in episode.error


class Graded(Task):
    """A task whose grader is the test's."""

    name = "graded"

    def __init__(self, grader: Any) -> None:
        self.grader = grader

    def size(self, split: Split) -> int:
        return 1

    def make(self, split: Split, index: int, seed: int) -> Problem:
        return Problem(problem_id="p", messages=({"role": "user", "content": "?"},), answer="1")

    def grade(self, problem: Problem, attempt: Attempt) -> Any:
        return self.grader(attempt)


class InlineGraded(Graded):
    grades_inline = True


class AsyncGraded(Graded):
    async def grade(self, problem: Problem, attempt: Attempt) -> Any:
        await asyncio.sleep(0)
        return self.grader(attempt)


def answer_one(stage: Any) -> Any:
    return lambda text, request: [*stage.codec.encode(["1"]), stage.codec.vocabulary.control.close]


def graded(stage: Any, task: Task, **changes: Any) -> Episode:
    stage.task, stage.tool_names, stage.policy = task, (), answer_one(stage)
    return asyncio.run(run_episode(stage.harness(**changes), task.make(Split.DEV, 0, 0), DRAW, episode_id="e"))


@pytest.mark.parametrize(("value", "outcome", "reward"), [
    (True, Outcome.OK, 1.0), (False, Outcome.WRONG, 0.0), (0.5, Outcome.WRONG, 0.5), (1, Outcome.OK, 1.0),
    (Verdict(reward=0.2, correct=True), Outcome.OK, 0.2),
])
@pytest.mark.parametrize("kind", [Graded, InlineGraded, AsyncGraded])
def test_verdicts(stage: Any, kind: Any, value: Any, outcome: Outcome, reward: float) -> None:
    episode = graded(stage, kind(lambda attempt: value))
    assert (episode.outcome, episode.reward, episode.answer) == (outcome, reward, "1")


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("kind", [Graded, InlineGraded, AsyncGraded])
@pytest.mark.parametrize(("grader", "reason"), [
    (lambda attempt: math.nan, "reward nan"),
    (lambda attempt: math.inf, "reward inf"),
    (lambda attempt: Verdict(reward=math.nan, correct=True), "reward nan"),
    (lambda attempt: None, "NoneType"),
    (lambda attempt: _raise(ValueError("bad grader")), "raised ValueError: bad grader"),
    (lambda attempt: _raise(TimeoutError("its own")), "raised TimeoutError: its own"),
    (lambda attempt: _raise(SandboxError("gone")), "gone"),
])
def test_bad_graders_are_infrastructure(stage: Any, kind: Any, grader: Any, reason: str) -> None:
    episode = graded(stage, kind(grader))
    assert (episode.outcome, episode.reward) == (Outcome.INFRA_ERROR, None)
    assert reason in episode.error


def test_hanging_graders_are_infrastructure(stage: Any) -> None:
    release = threading.Event()
    try:
        episode = graded(stage, Graded(lambda attempt: release.wait(30)), grade_timeout_s=0.05)
    finally:
        release.set()
    assert episode.outcome is Outcome.INFRA_ERROR
    assert "longer than 0.05 s" in episode.error

    class Asleep(Graded):
        async def grade(self, problem: Problem, attempt: Attempt) -> Any:
            await asyncio.sleep(30)

    episode = graded(stage, Asleep(None), grade_timeout_s=0.05)
    assert episode.outcome is Outcome.INFRA_ERROR


class UserTool:
    """A tool without sandbox, whose code is the test's."""

    name, description, effect, session = "adder", "Add.", Effect.PURE, ""
    parameters = {  # noqa: RUF012
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
    }

    def __init__(self, work: Any) -> None:
        self.work = work

    async def call(self, arguments: Any, bench: Bench) -> Any:
        return self.work(arguments)


@pytest.mark.parametrize(("written", "work", "outcome", "shown"), [
    ("2", lambda a: ToolResult(text=str(a["a"] + a["b"])), Outcome.OK, "4"),
    ("two", lambda a: ToolResult(text="0"), Outcome.OK, "error: a must be integer"),
    ("true", lambda a: ToolResult(text="0"), Outcome.OK, "error: a must be integer"),
    ("2", lambda a: _raise(KeyError("bug")), Outcome.INFRA_ERROR, "adder raised KeyError"),
    ("2", lambda a: "text", Outcome.INFRA_ERROR, "returned a str"),
])
def test_users_tools(stage: Any, written: str, work: Any, outcome: Outcome, shown: str) -> None:
    close = stage.codec.vocabulary.control.close

    def policy(text: str, request: Any) -> list[int]:
        if text.endswith('tool="'):
            return stage.codec.encode(["adder", '"'])
        if text.endswith('type="number"<|sep|>'):
            return [*stage.codec.encode([written]), close]
        return [*stage.codec.encode(["1"]), close] if 'role="tool"' in text else [close]

    stage.task, stage.policy = Graded(lambda attempt: True), policy
    tools = [UserTool(work)]
    scaffold = type(stage.harness().scaffold)(stage.codec, tools, declare=True)
    stage.settings = replace(stage.settings, max_model_len=1024)
    harness = stage.harness(tools=tools, scaffold=scaffold)
    episode = asyncio.run(run_episode(harness, stage.task.make(Split.DEV, 0, 0), DRAW, episode_id="e"))
    assert episode.outcome is outcome
    assert shown in (episode.error or episode.tool_calls[0].result.text)


def test_free_scaffold(stage: Any) -> None:
    problem = stage.task.make(Split.DEV, 0, 7)
    shown = stage.harness().scaffold.demonstration(problem, stage.task.demonstrate(problem)).ids
    prefix = stage.codec.encode(stage.codec.generation_prefix(thinking=True))
    turns = _turns(shown, prefix, stage.codec.vocabulary.control.end_of_msg)
    stage.settings = replace(stage.settings, scaffold="free", max_sampled_tokens=120)
    stage.policy = lambda text, request: turns[text.count('role="assistant"') - 1]
    episode, _ = play(stage, problem=problem)
    assert (episode.outcome, episode.turns) == (Outcome.OK, 2)
    assert episode.log.ids == shown, "the same tokens as in the forced mode"
    assert episode.log.num_sampled > 40
    stage.policy = lambda text, request: turns[0]
    episode, _ = play(stage, problem=problem)
    assert episode.outcome is Outcome.TRUNCATED, "calls in every turn never answer"


def _turns(ids: list[int], prefix: list[int], end: int) -> list[list[int]]:
    """What follows each generation prefix, up to the end of the message."""
    out = []
    for at in range(len(ids)):
        if ids[at : at + len(prefix)] == prefix:
            begin = at + len(prefix)
            out.append(ids[begin : ids.index(end, begin) + 1])
    return out


def test_cancelled_episode_leaves_nothing(stage: Any) -> None:
    async def main() -> None:
        stage.delay = lambda request_id: 30.0 if request_id.endswith(".3") else 0.0
        async with SandboxPool(stage.service, size=1, lease="test", sessions=("python",)) as pool:
            harness = stage.harness(pool)
            task = asyncio.ensure_future(
                run_episode(harness, stage.task.make(Split.DEV, 0, 7), DRAW, episode_id="e"))
            while pool.lent == 0:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0)
            await pool.settle()
            assert (pool.lent, pool.free, harness.engine.sessions) == (0, 1, {})

    asyncio.run(main())
    assert stage.service.alive == set()
