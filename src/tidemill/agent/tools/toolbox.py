"""Three small tools that need no sandbox: arithmetic, text operations, and a made-up folder of notes.

They answer at once and always the same, so that their use can be demonstrated without running anything, and measured
anywhere.
"""

from __future__ import annotations

import ast
import hashlib
import operator
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from tidemill.agent.tool import Bench, Effect, ToolResult, refusal

MAX_EXPRESSION = 200
"""Characters of an expression; longer ones are refused."""
_MAX_BITS = 256
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

OPERATIONS: Mapping[str, Callable[[str], str]] = {
    "upper": str.upper,
    "lower": str.lower,
    "reverse": lambda text: text[::-1],
    "length": lambda text: str(len(text)),
    "words": lambda text: str(len(text.split())),
}
"""What the text tool can do."""

_WORDS = ("amber", "basin", "cedar", "delta", "ember", "frost", "grove", "harbor", "inlet", "juniper", "kelp", "lagoon",
          "meadow", "north", "oasis", "pebble", "quarry", "ridge", "summit", "thicket", "upland", "valley", "willow",
          "yarrow")


def calculate(expression: str) -> str:
    """Value of integers joined by + - * // % and parentheses. ValueError, in words for the policy, if it has none."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError("the expression is too long")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except SyntaxError as e:
        raise ValueError("not an expression") from e
    except ZeroDivisionError as e:
        raise ValueError("division by zero") from e


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise ValueError("the numbers are too large")
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("only integers and + - * // % are known")


def note(path: str) -> str:
    """What the made-up file `path` says: two to four words that follow from its name."""
    digest = hashlib.sha256(path.encode()).digest()
    return " ".join(_WORDS[b % len(_WORDS)] for b in digest[1 : 3 + digest[0] % 3])


def listing(folder: str) -> str:
    """The made-up files of a folder, one a line."""
    digest = hashlib.sha256(folder.encode()).digest()
    names = dict.fromkeys(_WORDS[b % len(_WORDS)] for b in digest[1 : 3 + digest[0] % 3])
    return "\n".join(f"{name}.txt" for name in names)


class CalculatorTool:
    """Integer arithmetic."""

    name = "calculator"
    description = "Evaluate integer arithmetic."
    parameters: Mapping[str, Any] = {
        "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"],
    }
    effect = Effect.PURE
    session = ""

    async def call(self, arguments: Mapping[str, Any], bench: Bench) -> ToolResult:
        try:
            return ToolResult(text=calculate(arguments["expression"]))
        except (ValueError, RecursionError) as e:
            return refusal(str(e))


class TextTool:
    """One of OPERATIONS on a text."""

    name = "text"
    description = "Do an operation on a text: upper, lower, reverse, length, words."
    parameters: Mapping[str, Any] = {
        "type": "object", "properties": {"operation": {"type": "string"}, "text": {"type": "string"}},
        "required": ["operation", "text"],
    }
    effect = Effect.PURE
    session = ""

    async def call(self, arguments: Mapping[str, Any], bench: Bench) -> ToolResult:
        operation = OPERATIONS.get(arguments["operation"])
        if operation is None:
            return refusal(f"no operation {arguments['operation']}: expected one of {', '.join(OPERATIONS)}")
        return ToolResult(text=operation(arguments["text"]))


class FilesTool:
    """Short text files. Every path can be read; what an episode writes is seen by that episode only."""

    name = "files"
    description = "Read, write or list files."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"action": {"type": "string"}, "path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["action", "path"],
    }
    effect = Effect.IDEMPOTENT
    session = ""

    def __init__(self) -> None:
        self._written: WeakKeyDictionary[Bench, dict[str, str]] = WeakKeyDictionary()

    async def call(self, arguments: Mapping[str, Any], bench: Bench) -> ToolResult:
        action, path = arguments["action"], arguments["path"]
        written = self._written.setdefault(bench, {})
        if action == "read":
            return ToolResult(text=written.get(path) or note(path))
        if action == "list":
            return ToolResult(text=listing(path))
        if action != "write":
            return refusal(f"no action {action}: expected read, write or list")
        if "content" not in arguments:
            return refusal("files needs content to write")
        written[path] = arguments["content"]
        return ToolResult(text="saved")
