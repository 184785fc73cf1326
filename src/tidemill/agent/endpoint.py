"""Episodes over any OpenAI-compatible endpoint: messages and tools in, messages out, no tokens seen.

For evaluation only: without token ids and log-probs nothing can be trained on. Outcomes are the same as over our own
engine; an endpoint that fails, times out or answers nonsense is infrastructure.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httpx

from tidemill.agent.episode import Draw, Episode
from tidemill.agent.grading import grade
from tidemill.agent.loan import BenchLoan
from tidemill.agent.pool import SandboxPool
from tidemill.agent.task import Attempt, Message, Problem, Task
from tidemill.agent.tool import Tool, ToolCall, ToolLimits, declaration, invoke, refusal
from tidemill.core.config import require, require_positive
from tidemill.core.errors import EngineError, InputError, TidemillError
from tidemill.core.outcomes import Outcome
from tidemill.core.token_log import TokenLog

_RETRY_STATUS = (408, 429, 502, 503, 504)
_SEED_LIMIT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """base_url: up to and including `/v1`. max_tokens: per assistant turn. effort: sent as `reasoning_effort` unless
    empty. timeout_s: per request. retries: of requests that were refused for now or never answered."""

    base_url: str
    model: str
    max_tokens: int = 1024
    max_turns: int = 8
    effort: str = ""
    timeout_s: float = 600.0
    retries: int = 3

    def __post_init__(self) -> None:
        ok = self.base_url.startswith(("http://", "https://"))
        require(ok, field="endpoint", value=self.base_url, expected="a URL like http://127.0.0.1:8000/v1")
        require(bool(self.model), field="model", value=self.model, expected="the endpoint's name of the model")
        require_positive(self, "max_tokens", "max_turns", "timeout_s")


class Endpoint:
    """A connection to one endpoint. `async with Endpoint(config) as endpoint`."""

    def __init__(self, config: EndpointConfig, *, api_key: str = "", transport: httpx.AsyncBaseTransport | None = None,
                 pause_s: float = 1.0) -> None:
        self.config = config
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(base_url=config.base_url.rstrip("/") + "/", headers=headers, limits=limits,
                                         timeout=config.timeout_s, transport=transport, trust_env=False)
        self._pause_s = pause_s

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    async def models(self) -> list[str]:
        """What the endpoint serves. Raises EngineError if it cannot be reached."""
        answer = await self._send("GET", "models", None)
        return [str(row["id"]) for row in answer.get("data", []) if isinstance(row, dict) and "id" in row]

    async def chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], draw: Draw) -> dict[str, Any]:
        """One completion: the raw answer. Raises InputError (the endpoint refused the request), EngineError."""
        body: dict[str, Any] = {
            "model": self.config.model, "messages": list(messages), "max_tokens": self.config.max_tokens,
            "temperature": draw.temperature, "seed": (draw.seed * 1_000_003 + draw.sequence) % _SEED_LIMIT,
        }
        if tools:
            body["tools"] = list(tools)
        if self.config.effort:
            body["reasoning_effort"] = self.config.effort
        return await self._send("POST", "chat/completions", body)

    async def _send(self, method: str, path: str, body: Any) -> dict[str, Any]:
        for attempt in range(self.config.retries + 1):
            last = attempt == self.config.retries
            try:
                answer = await self._client.request(method, path, json=body)
            except httpx.HTTPError as e:
                if last:
                    raise EngineError(f"{self.config.base_url}: {type(e).__name__}: {e}") from e
            else:
                if answer.status_code not in _RETRY_STATUS or last:
                    return _read(answer, self.config.base_url)
            await asyncio.sleep(self._pause_s * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


def _read(answer: httpx.Response, base_url: str) -> dict[str, Any]:
    try:
        data = answer.json()
    except ValueError as e:
        raise EngineError(f"{base_url}: status {answer.status_code}, and the body is not JSON") from e
    if answer.status_code >= 400 or not isinstance(data, dict):
        error = data.get("error") if isinstance(data, dict) else None
        said = error.get("message") if isinstance(error, dict) else error
        message = f"{base_url}: status {answer.status_code}: {said or answer.text[:200]}"
        raise InputError(message) if 400 <= answer.status_code < 500 else EngineError(message)
    return cast("dict[str, Any]", data)


@dataclass(kw_only=True)
class EndpointHarness:
    """What all episodes of an evaluation share."""

    endpoint: Endpoint
    task: Task
    tools: Sequence[Tool]
    limits: ToolLimits
    pool: SandboxPool | None = None
    grade_timeout_s: float = 10.0


@dataclass
class _Conversation:
    harness: EndpointHarness
    problem: Problem
    draw: Draw
    messages: list[Message] = field(default_factory=list[Message])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    usage: Counter[str] = field(default_factory=Counter[str])
    turns: int = 0
    generate_s: float = 0.0

    def __post_init__(self) -> None:
        self.loan = BenchLoan(self.harness.pool, self.problem, self.harness.limits)
        self._tools = {tool.name: tool for tool in self.harness.tools}

    async def run(self) -> tuple[str, Outcome | None]:
        """(answer, TRUNCATED if a limit ended it)."""
        self.messages = list(self.problem.messages)
        declared = [declaration(tool) for tool in self.harness.tools]
        answer = ""
        for turn in range(1, self.harness.endpoint.config.max_turns + 1):
            self.turns = turn
            started = time.perf_counter()
            raw = await self.harness.endpoint.chat(self.messages, declared, self.draw)
            self.generate_s += time.perf_counter() - started
            message, reason = self._first_choice(raw)
            self._count(raw.get("usage"))
            answer = str(message.get("content") or "")
            calls = message.get("tool_calls") or []
            self.messages.append({"role": "assistant", **{k: message[k] for k in (
                "content", "reasoning_content", "tool_calls") if message.get(k)}} | {"content": answer})
            if reason == "length":
                return answer, Outcome.TRUNCATED
            if not calls:
                return answer, None
            for call in calls:
                await self._carry_out(call)
        return answer, Outcome.TRUNCATED

    def _first_choice(self, raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
        try:
            choice = raw["choices"][0]
            return dict(choice["message"]), str(choice.get("finish_reason"))
        except (KeyError, IndexError, TypeError) as e:
            raise EngineError(f"the endpoint's answer holds no message: {json.dumps(raw)[:200]}") from e

    def _count(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.usage.update({k: v for k, v in usage.items() if isinstance(v, int)})

    async def _carry_out(self, call: Any) -> None:
        function = call.get("function") if isinstance(call, dict) else None
        name = str(function.get("name") or "") if isinstance(function, dict) else ""
        arguments: dict[str, Any] = {}
        problem = "" if name in self._tools else f"no tool {name}"
        try:
            parsed = json.loads(function["arguments"]) if isinstance(function, dict) else None
        except (KeyError, TypeError, ValueError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = cast("dict[str, Any]", parsed)
        else:
            problem = problem or "malformed call: the arguments are not a JSON object"
        if problem:
            done = ToolCall(tool=name, arguments=arguments, result=refusal(problem), duration_s=0.0, error=problem)
        else:
            done = await invoke(self._tools[name], arguments, await self.loan.get())
            if self.harness.pool is not None and not done.error:
                self.harness.pool.stats.note_tool(done.duration_s)
        self.calls.append(done)
        call_id = call.get("id") if isinstance(call, dict) else ""
        self.messages.append({"role": "tool", "tool_call_id": str(call_id or ""), "content": done.result.text})


async def run_endpoint_episode(harness: EndpointHarness, problem: Problem, draw: Draw) -> Episode:
    """One episode. Raises only what is a bug or a cancellation; every failure is an outcome. Its token log is empty."""
    started = time.perf_counter()
    talk = _Conversation(harness, problem, draw)
    verdict, reward, error = None, None, ""
    answer, outcome = "", Outcome.INFRA_ERROR
    try:
        if harness.tools and problem.setup is not None:
            talk.loan.want()
        answer, limit = await talk.run()
        bench = await talk.loan.get() if harness.task.grades_in_sandbox else None
        attempt = Attempt(answer=answer, complete=limit is None, messages=tuple(talk.messages),
                          tool_calls=tuple(talk.calls), sandbox=bench.sandbox if bench else None)
        verdict = await grade(harness.task, problem, attempt, timeout_s=harness.grade_timeout_s)
        reward = verdict.reward
        outcome = limit or (Outcome.OK if verdict.correct else Outcome.WRONG)
    except TidemillError as e:
        error = f"{type(e).__name__}: {e}"
    finally:
        await talk.loan.close()
    return Episode(problem_id=problem.problem_id, log=TokenLog(), outcome=outcome, reward=reward, answer=answer,
                   verdict=verdict, turns=talk.turns, tool_calls=tuple(talk.calls), error=error,
                   seconds=time.perf_counter() - started, generate_s=talk.generate_s, usage=dict(talk.usage))
