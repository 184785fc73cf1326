"""What a tool is, and the bench it works at: one sandbox with its live sessions, lent to one episode.

A tool turns arguments into text. What the guest program does (errors, endless output, invalid UTF-8, a passed deadline)
is a result for the model to read; only a failing sandbox service is an error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from tidemill.agent.registry import construct, load_object
from tidemill.core.errors import ConfigError, NotFoundError, SandboxError, TidemillError
from tidemill.core.sandbox_api import ExecResult, LiveSession, Sandbox


class Effect(StrEnum):
    """What repeating a call does; decides what may be retried or replayed after a fork."""

    PURE = "pure"
    """Changes nothing."""
    IDEMPOTENT = "idempotent"
    """Doing it twice is doing it once."""
    EFFECTFUL = "effectful"
    """Every call changes the world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """timeout_s: for the code of one call, a result when passed. output_bytes: of UTF-8 text that reaches the model.
    grace_s: what a tool may take beyond timeout_s before the call is an infrastructure failure."""

    timeout_s: float = 5.0
    output_bytes: int = 4096
    grace_s: float = 35.0


class ToolError(TidemillError):
    """A tool's own code raised or hung: infrastructure, not the policy's doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """`text` goes to the model. `ok` False: the call failed, by the policy's doing."""

    text: str
    ok: bool = True
    timed_out: bool = False
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as it was made: what the policy wrote, what it got, how long the tool took (excludes waiting for a
    sandbox). `error` is why a malformed call was not made."""

    tool: str
    arguments: Mapping[str, Any]
    result: ToolResult
    duration_s: float
    error: str = ""


class Tool(Protocol):
    """Something the policy can call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments object."""
    effect: Effect
    session: str
    """Kind of live session it uses, opened ahead of the call; empty: none."""

    async def call(self, arguments: Mapping[str, Any], bench: Bench) -> ToolResult:
        """Run it. Arguments have been checked against `parameters` (names, required, plain types)."""
        ...


class Bench:
    """A sandbox and its live sessions in the hands of one episode. Not for concurrent use. An episode whose tools need
    no sandbox has a bench without one."""

    def __init__(self, sandbox: Sandbox | None, sessions: dict[str, LiveSession], limits: ToolLimits) -> None:
        self._sandbox = sandbox
        self.limits = limits
        self._sessions = sessions

    @property
    def sandbox(self) -> Sandbox:
        """Raises SandboxError if the episode has none."""
        if self._sandbox is None:
            raise SandboxError("this episode has no sandbox", remedy="Give the rollout a SandboxPool.")
        return self._sandbox

    async def session(self, kind: str) -> LiveSession:
        """The live session of this kind; opened if there is none."""
        session = self._sessions.get(kind)
        if session is None:
            session = self._sessions[kind] = await self.sandbox.open_session(kind)
        return session

    async def run(self, kind: str, code: str) -> ExecResult | None:
        """Run code in the live session. None if the session had ended (the code did not run); the next call opens a new
        one. A session that passed its deadline is dropped."""
        session = await self.session(kind)
        try:
            result = await session.run(code, timeout_s=self.limits.timeout_s, max_output_bytes=self.limits.output_bytes)
        except NotFoundError:
            del self._sessions[kind]
            return None
        if result.timed_out:
            del self._sessions[kind]
        return result


def present(result: ExecResult | None, limits: ToolLimits, *, whole_traceback: bool = False) -> ToolResult:
    """What the model reads of a command: stdout, then what went wrong, cut to the limit, always valid UTF-8."""
    if result is None:
        return ToolResult(text="error: the session had ended; a new one opens with the next call", ok=False)
    parts = [result.stdout.decode("utf-8", "replace").rstrip("\n")]
    errors = result.stderr.decode("utf-8", "replace").strip("\n")
    failed = result.exit_code != 0
    if errors:
        parts.append(errors if whole_traceback or not failed else errors.rpartition("\n")[2])
    if result.timed_out:
        parts.append(f"error: stopped after {limits.timeout_s:g} s")
    elif failed and not errors:
        parts.append(f"error: exit code {result.exit_code}" if result.exit_code is not None
                     else f"error: killed by signal {result.signal}")
    text, cut = cut_text("\n".join(p for p in parts if p), limits.output_bytes, missing=result.truncated)
    return ToolResult(text=text, ok=not failed and not result.timed_out, timed_out=result.timed_out,
                      truncated=cut)


def cut_text(text: str, limit_bytes: int, *, missing: bool = False) -> tuple[str, bool]:
    """At most `limit_bytes` of UTF-8, whole characters, with a note at the end if something is missing (also if
    `missing` says that something was before)."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit_bytes and not missing:
        return raw.decode(), False
    note = " [cut]"
    keep = max(0, limit_bytes - len(note))
    return raw[:keep].decode("utf-8", "ignore") + note[:limit_bytes], True


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,), "object": (dict,),
    "array": (list,), "null": (type(None),),
}


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Why the arguments do not fit the tool, in words for the policy; empty if they do."""
    properties: Mapping[str, Any] = tool.parameters.get("properties", {})
    for key in tool.parameters.get("required", ()):
        if key not in arguments:
            return f"{tool.name} needs {key}"
    for key, value in arguments.items():
        if key not in properties:
            return f"{tool.name} takes no {key}"
        kind = properties[key].get("type")
        allowed = _TYPES.get(kind, (object,)) if isinstance(kind, str) else (object,)
        # A bool is an int to Python, and no number to JSON.
        if not isinstance(value, allowed) or (isinstance(value, bool) and not {bool, object} & set(allowed)):
            return f"{key} must be {kind}"
    return ""


async def invoke(tool: Tool, arguments: Mapping[str, Any], bench: Bench) -> ToolCall:
    """Check, call and time. A malformed call is answered without running anything. Raises SandboxError, ToolError."""
    error = check_arguments(tool, arguments)
    start = time.perf_counter()
    result = refusal(error) if error else await _call(tool, arguments, bench)
    text, cut = cut_text(result.text, bench.limits.output_bytes)
    if cut:
        result = ToolResult(text=text, ok=result.ok, timed_out=result.timed_out, truncated=True)
    return ToolCall(tool=tool.name, arguments=arguments, result=result, duration_s=time.perf_counter() - start,
                    error=error)


async def _call(tool: Tool, arguments: Mapping[str, Any], bench: Bench) -> ToolResult:
    limit = bench.limits.timeout_s + bench.limits.grace_s
    try:
        async with asyncio.timeout(limit):
            result = await tool.call(arguments, bench)
    except TidemillError:
        raise
    except TimeoutError as e:
        raise ToolError(f"tool {tool.name} took longer than {limit:g} s") from e
    except Exception as e:
        raise ToolError(f"tool {tool.name} raised {type(e).__name__}: {e}") from e
    if not isinstance(result, ToolResult):
        raise ToolError(f"tool {tool.name} returned a {type(result).__name__}, expected a ToolResult")
    return result


def refusal(reason: str) -> ToolResult:
    """The result of a call that could not be made."""
    return ToolResult(text=f"error: {reason}", ok=False)


def declaration(tool: Tool) -> dict[str, Any]:
    """The tool in OpenAI's shape."""
    parameters = json.loads(json.dumps(tool.parameters))
    return {"type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": parameters}}


TOOLS: dict[str, str] = {
    "python": "tidemill.agent.tools.python:PythonTool",
    "sh": "tidemill.agent.tools.sh:ShellTool",
    "calculator": "tidemill.agent.tools.toolbox:CalculatorTool",
    "text": "tidemill.agent.tools.toolbox:TextTool",
    "files": "tidemill.agent.tools.toolbox:FilesTool",
}
"""Tools that come with the package. Anything else is named `module:object` or `file.py:object`."""

_FIELDS = ("name", "description", "parameters", "effect", "session", "call")


def load_tool(name: str, options: Mapping[str, Any] | None = None) -> Tool:
    """A tool by name. Raises ConfigError (unknown name or option, fields missing)."""
    tool = construct(load_object(name, TOOLS, kind="tool"), options or {}, kind="tool", name=name)
    missing = [f for f in _FIELDS if not hasattr(tool, f)]
    if missing:
        raise ConfigError(f"tool = {name!r} lacks {', '.join(missing)}", field="tool")
    return tool
