"""A live shell in the sandbox: working directory and variables stay from call to call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.agent.tool import Bench, Effect, ToolResult, present


class ShellTool:
    """stdout first, then all of stderr: shells report on both."""

    name = "sh"
    description = "Run a command in a live POSIX shell. Working directory and variables stay."
    parameters: Mapping[str, Any] = {
        "type": "object", "properties": {"command": {"type": "string", "description": "shell command"}},
        "required": ["command"],
    }
    effect = Effect.EFFECTFUL
    session = "sh"

    async def call(self, arguments: Mapping[str, Any], bench: Bench) -> ToolResult:
        return present(await bench.run("sh", arguments["command"]), bench.limits, whole_traceback=True)
