"""Requests in, responses out: bodies within their limit, callers who went away, rows as JSON."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tidemill.core.errors import TidemillError
from tidemill.core.sandbox_api import ExecResult, SandboxState
from tidemill.sandbox.api.errors import BodyTooLargeError, error_body
from tidemill.sandbox.api.schema import to_json
from tidemill.sandbox.orchestrator import Orchestrator
from tidemill.sandbox.store import SandboxRow

T = TypeVar("T")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as more than `limit` bytes are announced or sent."""
    announced = request.headers.get("content-length", "0")
    parts: list[bytes] = []
    size = 0
    if not announced.isdigit() or int(announced) <= limit:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
        else:
            return parts[0] if len(parts) == 1 else b"".join(parts)
    raise BodyTooLargeError(f"the body is larger than the {limit} bytes this endpoint takes.", field="body")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but cancel it if the caller goes away: a command nobody waits for should not run on.

    Raises ClientDisconnect in that case. The body must have been read."""
    task = asyncio.get_running_loop().create_task(work)
    watch = asyncio.get_running_loop().create_task(_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, TidemillError):
                await task


async def or_undo(request: Request, orchestrator: Orchestrator, work: Coroutine[Any, Any, T],
                  made: Callable[[T], list[SandboxRow]]) -> T:
    """Await `work`, which makes sandboxes; if the caller has gone away by then, end them, since nobody knows
    their ids."""
    task = asyncio.get_running_loop().create_task(work)
    watch = asyncio.get_running_loop().create_task(_gone(request))
    try:
        result = await task
        if watch.done():
            await orchestrator.kill_many(made(result), reason="the caller went away before it was created")
            raise ClientDisconnect
        return result
    finally:
        watch.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json", headers=headers)


def error_response(error: TidemillError, status: int) -> Response:
    """The error as JSON; only what may be tried again says so."""
    return json_response(error_body(error, status=status), status,
                         {"Should-Retry": "true" if error.retryable else "false"})


def sandbox_json(row: SandboxRow) -> dict[str, Any]:
    """A sandbox as E2B's clients expect it (state is `running` or `paused`), with our fields beside it."""
    frozen = row.state in (SandboxState.PAUSING, SandboxState.PAUSED)
    return {
        "sandboxID": row.sandbox_id, "templateID": row.template, "clientID": "",
        "state": "paused" if frozen else "running", "startedAt": _rfc3339(row.created_at),
        "endAt": _rfc3339(row.expires_at), "metadata": dict(row.metadata), "phase": row.state.value,
        "backend": row.backend, "lease": row.lease,
        "parentID": row.parent_id, "generation": row.generation,
    }


def sandbox_or_error(result: SandboxRow | TidemillError) -> dict[str, Any]:
    """One entry of a batch or fork answer."""
    return {"error": error_body(result)} if isinstance(result, TidemillError) else {"sandbox": sandbox_json(result)}


def exec_json(result: ExecResult) -> dict[str, Any]:
    """A result; stdout and stderr are base64."""
    return {
        "exitCode": result.exit_code, "stdout": base64.b64encode(result.stdout).decode(),
        "stderr": base64.b64encode(result.stderr).decode(), "durationMs": round(result.duration_ms, 3),
        "timedOut": result.timed_out, "truncated": result.truncated, "signal": result.signal,
    }


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
