"""Episodes over an OpenAI-compatible endpoint: the conversation it sees, every outcome, retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tidemill.agent.endpoint import Endpoint, EndpointConfig, EndpointHarness, run_endpoint_episode
from tidemill.agent.episode import Draw, Episode
from tidemill.agent.pool import SandboxPool
from tidemill.agent.rollout import EpisodeRequest, run_requests
from tidemill.agent.task import Split
from tidemill.agent.tool import ToolLimits, load_tool
from tidemill.core.errors import ConfigError, EngineError
from tidemill.core.outcomes import Outcome

Reply = Callable[[dict[str, Any]], "httpx.Response | Exception"]
URL = "http://127.0.0.1:1/v1"


def say(content: str = "", *, calls: list[tuple[str, str]] | None = None, reason: str = "") -> httpx.Response:
    """A completion."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None, "reasoning_content": "thought"}
    if calls:
        message["tool_calls"] = [{"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}}
                                 for i, (n, a) in enumerate(calls)]
    choice = {"index": 0, "message": message, "finish_reason": reason or ("tool_calls" if calls else "stop")}
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13, "completion_tokens_details": {}}
    return httpx.Response(200, json={"choices": [choice], "usage": usage})


def right(body: dict[str, Any]) -> httpx.Response:
    """Plays the ledger as it should be played."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return say(last["content"])
    return say(calls=[("python", json.dumps({"code": last["content"]}))])


def play(stage: Any, reply: Reply, *, count: int = 1, **config: Any) -> tuple[list[Episode], list[dict[str, Any]]]:
    """Episodes against `reply`, and the bodies it was sent. Nothing is left afterwards."""
    bodies: list[dict[str, Any]] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/chat/completions"
        assert request.headers["authorization"] == "Bearer key"
        body = json.loads(request.content)
        bodies.append(body)
        await asyncio.sleep(0)
        answer = reply(body)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> list[Episode]:
        tools = [load_tool(name) for name in stage.tool_names]
        limits = ToolLimits(timeout_s=1.0, output_bytes=64)
        settings = EndpointConfig(**{"base_url": URL, "model": "m", "retries": 2} | config)
        async with (
            Endpoint(settings, api_key="key", transport=httpx.MockTransport(handle), pause_s=0.0) as endpoint,
            SandboxPool(stage.service, size=2, lease="eval", sessions=("python",), limits=limits) as pool,
        ):
            harness = EndpointHarness(endpoint=endpoint, task=stage.task, tools=tools, limits=limits, pool=pool)
            requests = [EpisodeRequest(episode_id=str(i), problem=stage.task.make(Split.DEV, i, 7),
                                       draw=Draw(seed=1, sequence=i, temperature=0.5)) for i in range(count)]
            done = await run_requests(
                lambda r: run_endpoint_episode(harness, r.problem, r.draw), requests, concurrency=4)
            await pool.settle()
            assert (pool.lent, pool.free) == (0, 2)
            return done

    episodes = asyncio.run(main())
    assert stage.service.alive == set()
    return episodes, bodies


def test_right_episode_and_what_the_endpoint_saw(stage: Any) -> None:
    (episode,), bodies = play(stage, right, effort="low", max_tokens=77)
    assert (episode.outcome, episode.reward, episode.turns, len(episode.log)) == (Outcome.OK, 1.0, 2, 0)
    assert episode.usage == {"prompt_tokens": 20, "completion_tokens": 6, "total_tokens": 26}
    first, second = bodies
    sent = {"model": "m", "max_tokens": 77, "temperature": 0.5, "reasoning_effort": "low"}
    assert {key: first[key] for key in sent} == sent
    assert [t["function"]["name"] for t in first["tools"]] == ["python"]
    assert first["seed"] == second["seed"]
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][1]["reasoning_content"] == "thought", "earlier thinking is sent back"
    assert second["messages"][1]["tool_calls"][0]["id"] == second["messages"][2]["tool_call_id"] == "c0"


def test_many_at_once_keep_their_order_and_seeds(stage: Any) -> None:
    episodes, bodies = play(stage, right, count=9)
    assert [e.outcome for e in episodes] == [Outcome.OK] * 9
    assert [e.problem_id for e in episodes] == [f"dev-{i}-7" for i in range(9)]
    assert len({b["seed"] for b in bodies}) == 9


@pytest.mark.parametrize(("calls", "told"), [
    ([("nosuch", "{}")], "error: no tool nosuch"),
    ([("python", "{")], "error: malformed call: the arguments are not a JSON object"),
    ([("python", "[1]")], "error: malformed call: the arguments are not a JSON object"),
    ([("python", "{}")], "error: python needs code"),
    ([("python", '{"code": 3}')], "error: code must be string"),
])
def test_what_the_policy_gets_wrong_is_told_to_it(stage: Any, calls: list[tuple[str, str]], told: str) -> None:
    (episode,), bodies = play(stage, lambda b: say("0") if b["messages"][-1]["role"] == "tool" else say(calls=calls))
    assert episode.outcome is Outcome.WRONG
    assert bodies[-1]["messages"][-1]["content"] == told


def test_several_calls_in_one_turn(stage: Any) -> None:
    calls = [("python", '{"code": "x = 20"}'), ("python", '{"code": "x + 1"}')]
    (episode,), bodies = play(stage, lambda b: say("0") if b["messages"][-1]["role"] == "tool" else say(calls=calls))
    assert [m["content"] for m in bodies[-1]["messages"][2:]] == ["", "21"], "one live session"
    assert len(episode.tool_calls) == 2


def test_limits_truncate(stage: Any) -> None:
    (episode,), _ = play(stage, lambda b: say("12", reason="length"))
    assert (episode.outcome, episode.answer, episode.reward) == (Outcome.TRUNCATED, "12", 0.0)
    (episode,), bodies = play(stage, lambda b: say(calls=[("python", '{"code": "1"}')]), max_turns=3)
    assert (episode.outcome, len(bodies)) == (Outcome.TRUNCATED, 3)


@pytest.mark.parametrize(("reply", "reason", "requests"), [
    (httpx.Response(503, json={"error": {"message": "loading"}}), "status 503: loading", 3),
    (httpx.ConnectError("refused"), "ConnectError", 3),
    (httpx.ReadTimeout("slow"), "ReadTimeout", 3),
    (httpx.Response(400, json={"error": {"message": "too long"}}), "status 400: too long", 1),
    (httpx.Response(404, json={"detail": "x"}), "status 404", 1),
    (httpx.Response(500, text="<html>"), "not JSON", 1),
    (httpx.Response(200, json={"choices": []}), "holds no message", 1),
    (httpx.Response(200, json=[]), "status 200", 1),
])
def test_endpoint_failures_are_infrastructure(stage: Any, reply: Any, reason: str, requests: int) -> None:
    (episode,), bodies = play(stage, lambda b: reply)
    assert (episode.outcome, episode.reward) == (Outcome.INFRA_ERROR, None)
    assert reason in episode.error
    assert len(bodies) == requests


def test_a_refusal_for_now_is_tried_again(stage: Any) -> None:
    answers = iter([httpx.Response(429, json={}), httpx.ConnectError("restarting")])
    (episode,), bodies = play(stage, lambda b: next(answers, None) or right(b))
    assert episode.outcome is Outcome.OK
    assert len(bodies) == 4


def test_dead_sandbox_is_infrastructure(stage: Any) -> None:
    (episode,), _ = play(stage, lambda b: say(calls=[("python", '{"code": "die"}')]))
    assert episode.outcome is Outcome.INFRA_ERROR
    assert "SandboxDiedError" in episode.error


@pytest.mark.parametrize(("bad", "field"), [
    ({"base_url": "127.0.0.1:8000"}, "endpoint"), ({"model": ""}, "model"), ({"max_tokens": 0}, "max_tokens"),
])
def test_bad_config(bad: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        EndpointConfig(**{"base_url": URL, "model": "m"} | bad)


def test_unreachable_endpoint_says_so() -> None:
    async def main() -> None:
        async with Endpoint(EndpointConfig(base_url=URL, model="m", retries=0)) as endpoint:
            await endpoint.models()

    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1/v1: ConnectError"):
        asyncio.run(main())
