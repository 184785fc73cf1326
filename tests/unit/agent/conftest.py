"""Fakes of engine and sandbox service, with faults that tests can order."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tidemill.agent.episode import Harness
from tidemill.agent.scaffold import Scaffold
from tidemill.agent.task import Task, load_task
from tidemill.agent.tool import load_tool
from tidemill.core.engine_api import Completion, FinishReason, GenerateRequest
from tidemill.core.errors import NotFoundError, SandboxDiedError, SandboxError
from tidemill.core.sandbox_api import ExecResult
from tidemill.model.chat.codec import ChatCodec
from tidemill.model.chat.tokenizer import build_tokenizer

Policy = Callable[[str, GenerateRequest], "Sequence[int] | BaseException"]


class FakeEngine:
    """Sessions as lists; `policy(text so far, request)` says what is sampled, or the error to raise."""

    def __init__(self, codec: ChatCodec, policy: Policy, *, delay: Callable[[str], float] | None = None) -> None:
        self.codec, self.policy, self.delay = codec, policy, delay
        self.sessions: dict[str, list[int]] = {}
        self.requests: list[GenerateRequest] = []
        self.running = self.most_running = 0

    async def open_session(self, session_id: str) -> None:
        assert session_id not in self.sessions
        self.sessions[session_id] = []

    async def close_session(self, session_id: str) -> None:
        self.sessions.pop(session_id, None)

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(self.delay(request.request_id) if self.delay else 0)
        finally:
            self.running -= 1
        log = self.sessions[request.session_id or ""]
        log.extend(request.ids)
        wanted = self.policy(self.codec.describe(log), request)
        if isinstance(wanted, BaseException):
            raise wanted
        ids: list[int] = []
        reason = FinishReason.LENGTH
        for token in wanted:
            if len(ids) == request.sampling.max_tokens:
                break
            ids.append(token)
            if token in request.sampling.stop_token_ids:
                reason = FinishReason.STOP
                break
        prompt = len(log)
        log.extend(ids)
        return Completion(request_id=request.request_id, ids=tuple(ids), logprobs=(-0.5,) * len(ids),
                          model_logprobs=(-0.5,) * len(ids), versions=(3,) * len(ids), finish_reason=reason,
                          prompt_tokens=prompt, cached_tokens=0)


@dataclass
class FakeSession:
    """A python session in this process; some code words stand for what guests do."""

    sandbox: FakeSandbox
    kind: str
    names: dict[str, Any] = field(default_factory=dict)
    ended: bool = False

    async def run(self, code: str, *, timeout_s: float = 10.0, max_output_bytes: int = 65_536) -> ExecResult:
        await self.sandbox.touch()
        if self.ended:
            raise NotFoundError("session ended")
        done: dict[str, Any] = {"exit_code": 0, "stdout": b"", "stderr": b"", "duration_ms": 0.1}
        flood = b"y\n" * (max_output_bytes // 2)
        if code == "forever":
            self.ended = True
            return ExecResult(**done | {"exit_code": None, "stdout": flood, "timed_out": True, "truncated": True,
                                        "signal": 9})
        if code == "rubbish":
            return ExecResult(**done | {"stdout": b"\xff\xfe ok\n"})
        if code == "die":
            self.sandbox.dead = True
            raise SandboxDiedError("the sandbox is gone")
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                tree = ast.parse(code)
                last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
                exec(compile(tree, "cell", "exec"), self.names)
                if isinstance(last, ast.Expr):
                    sys.displayhook(eval(compile(ast.Expression(last.value), "cell", "eval"), self.names))
        except (SyntaxError, NameError, ZeroDivisionError) as e:
            text = f"Traceback (most recent call last):\n  File cell\n{type(e).__name__}: {e}\n"
            return ExecResult(**done | {"exit_code": 1, "stderr": text.encode()})
        text = out.getvalue().encode()
        return ExecResult(**done | {"stdout": text[:max_output_bytes], "truncated": len(text) > max_output_bytes})

    async def close(self) -> None:
        self.ended = True


@dataclass
class FakeSandbox:
    """`dirt` is whatever earlier use left; a reset removes it."""

    service: FakeService
    sandbox_id: str
    lease: str
    sessions: list[FakeSession] = field(default_factory=list)
    dirt: bool = False
    dead: bool = False

    async def touch(self) -> None:
        await asyncio.sleep(0)
        self.service.calls += 1
        if self.dead:
            raise SandboxDiedError(f"{self.sandbox_id} is gone")

    async def open_session(self, kind: str = "sh") -> FakeSession:
        await self.touch()
        self.sessions.append(FakeSession(self, kind))
        return self.sessions[-1]

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self.touch()

    async def reset(self) -> None:
        await self.touch()
        if self.service.fail_reset(self.sandbox_id):
            raise SandboxError("reset failed")
        for session in self.sessions:
            session.ended = True
        self.sessions.clear()
        self.dirt = False

    async def kill(self) -> None:
        await asyncio.sleep(0)
        self.dead = True
        self.service.alive.discard(self)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class FakeService:
    """A SandboxClient. `fail_create` and `fail_reset` order faults; `alive` is what has not been killed."""

    def __init__(self) -> None:
        self.alive: set[FakeSandbox] = set()
        self.made = self.calls = 0
        self.fail_create: Callable[[int], bool] = lambda number: False
        self.fail_reset: Callable[[str], bool] = lambda sandbox_id: False

    async def create(self, *, template: str = "base", backend: str = "", lease: str = "", timeout_s: float = 3600.0,
                     metadata: Any = None) -> FakeSandbox:
        await asyncio.sleep(0)
        self.made += 1
        if self.fail_create(self.made):
            raise SandboxError("no room")
        sandbox = FakeSandbox(self, f"sb-{self.made}", lease)
        self.alive.add(sandbox)
        return sandbox

    async def release_lease(self, lease: str) -> int:
        mine = [s for s in self.alive if s.lease == lease]
        for sandbox in mine:
            await sandbox.kill()
        return len(mine)

    async def list(self, *, lease: str = "") -> list[FakeSandbox]:
        return [s for s in self.alive if s.lease == lease]

    async def close(self) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Settings:
    """As a recipe's agent section."""

    scaffold: str = "forced"
    max_turns: int = 2
    max_sampled_tokens: int = 48
    max_model_len: int = 192
    tool_timeout_s: float = 1.0
    tool_output_bytes: int = 64


def oracle(codec: ChatCodec) -> Policy:
    """Plays the ledger right in the forced scaffold."""
    close = codec.vocabulary.control.close

    def policy(text: str, request: GenerateRequest) -> list[int]:
        if text.endswith('tool="'):
            return codec.encode(["python", '"'])
        if text.endswith('type="string"<|sep|>'):
            asked = re.findall(r'role="user"<\|sep\|>(.*?)<\|close\|>', text)[-1]
            return [*codec.encode([asked]), close]
        results = re.findall(r'role="tool"[^|]*<\|sep\|>(.*?)<\|close\|>', text, re.S)
        return [*codec.encode([results[-1]]), close] if results else [close]

    return policy


@dataclass
class Stage:
    """Everything an episode needs, with parts a test may replace."""

    task: Task
    codec: ChatCodec
    service: FakeService
    settings: Settings = field(default_factory=Settings)
    policy: Policy | None = None
    delay: Callable[[str], float] | None = None
    tool_names: tuple[str, ...] = ("python",)
    declare: bool = False

    def harness(self, pool: Any = None, **changes: Any) -> Harness:
        tools = [load_tool(name) for name in self.tool_names]
        engine = FakeEngine(self.codec, self.policy or oracle(self.codec), delay=self.delay)
        known: dict[str, Any] = {
            "engine": engine, "task": self.task, "tools": tools, "settings": self.settings, "pool": pool,
            "scaffold": Scaffold(self.codec, tools, declare=self.declare),
        }
        return Harness(**known | changes)


def _make_stage() -> Stage:
    task = load_task("ledger")
    return Stage(task, ChatCodec(build_tokenizer(task.words)), FakeService())


@pytest.fixture(scope="session")
def make_stage() -> Callable[[], Stage]:
    return _make_stage


@pytest.fixture
def stage() -> Stage:
    return _make_stage()


@pytest.fixture
def service() -> FakeService:
    return FakeService()




@pytest.fixture(scope="session")
def service_type() -> type[FakeService]:
    return FakeService
