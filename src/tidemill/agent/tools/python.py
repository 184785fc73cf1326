"""Python in the sandbox's live interpreter: variables stay from call to call; a last expression is printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.agent.tool import Bench, Effect, ToolResult, present


class PythonTool:
    """`whole_traceback`: show all of a traceback; else its last line, which costs few tokens and says most."""

    name = "python"
    description = "Run Python code in a live interpreter. Variables stay. The value of a last expression is shown."
    parameters: Mapping[str, Any] = {
        "type": "object", "properties": {"code": {"type": "string", "description": "Python source"}},
        "required": ["code"],
    }
    effect = Effect.EFFECTFUL
    session = "python"

    def __init__(self, *, whole_traceback: bool = False) -> None:
        self._whole_traceback = whole_traceback

    async def call(self, arguments: Mapping[str, Any], bench: Bench) -> ToolResult:
        result = await bench.run("python", arguments["code"])
        return present(result, bench.limits, whole_traceback=self._whole_traceback)
