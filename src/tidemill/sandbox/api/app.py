"""The ASGI application: routes, API key, errors. One per orchestrator."""

from __future__ import annotations

import hmac
import logging
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemill import __version__
from tidemill.core.errors import NotFoundError, SandboxDiedError, SandboxError, TidemillError
from tidemill.sandbox.api.control import Control
from tidemill.sandbox.api.errors import MethodError, UnauthorizedError, status_of
from tidemill.sandbox.api.exchange import error_response, json_response
from tidemill.sandbox.api.extensions import Extensions
from tidemill.sandbox.api.schema import valid_id
from tidemill.sandbox.orchestrator import Orchestrator
from tidemill.sandbox.usage import Usage

log = logging.getLogger(__name__)

CLIENT_GONE = 499
_SANDBOX_PATH = re.compile(r"^(?:/x/v1|/v2)?/sandboxes/([^/]*)")


class _Guard:
    """Refuses requests without the API key, if there is one, and ids that cannot exist."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refuse(scope)
            if refusal is not None:
                await error_response(refusal, status_of(refusal))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refuse(self, scope: Scope) -> TidemillError | None:
        if self._key and scope["path"] != "/health":
            keys = [value for name, value in scope["headers"] if name == b"x-api-key"]
            if len(keys) != 1 or not hmac.compare_digest(keys[0], self._key):
                return UnauthorizedError("X-API-Key is missing or wrong.", field="X-API-Key")
        match = _SANDBOX_PATH.match(scope["path"])
        if match and not valid_id(match[1]):
            return NotFoundError(f"no sandbox {match[1][:80]!r}.")
        return None


def build_app(orchestrator: Orchestrator, *, api_key: str = "") -> Starlette:
    """The application over a recovered orchestrator. With an `api_key`, every request but GET /health must
    carry it; without one, whoever can open the socket is trusted (the unix socket has mode 0600)."""
    usage = Usage(orchestrator)

    async def health(_: Request) -> Response:
        return json_response({"status": "stopping" if orchestrator.stopping else "ok", "pid": os.getpid(),
                              "generation": orchestrator.store.daemon, "version": __version__,
                              "sandboxes": len(orchestrator.entries)})

    async def metrics(_: Request) -> Response:
        states = Counter(e.row.state.value for e in orchestrator.entries.values())
        text = orchestrator.metrics.render(states=dict(states), active=orchestrator.heavy.active,
                                           waiting=orchestrator.heavy.waiting)
        return Response(text, media_type="text/plain; version=0.0.4")

    routes = [*Extensions(orchestrator, usage).routes(), *Control(orchestrator).routes(),
              Route("/health", health, methods=["GET"]), Route("/metrics", metrics, methods=["GET"])]
    return Starlette(routes=routes, middleware=[Middleware(_Guard, api_key=api_key)],
                     exception_handlers=_handlers())


def _handlers() -> dict[type[Exception] | int, Callable[[Request, Exception], Awaitable[Response]]]:
    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, TidemillError)
        status = status_of(error)
        if isinstance(error, SandboxDiedError) and not request.url.path.startswith("/x/v1"):
            status = 404  # what E2B's clients understand for a sandbox that has ended
        if status >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, error)
        return error_response(error, status)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            refusal: TidemillError = MethodError(f"{request.url.path} does not take {request.method}.")
        else:
            refusal = NotFoundError(f"no endpoint {request.method} {request.url.path}.")
        return error_response(refusal, error.status_code)

    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def defect(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(SandboxError(f"the sandbox service failed: {type(error).__name__}.",
                                           remedy="See daemon.log in the state folder."), 500)

    return {TidemillError: known, HTTPException: http, ClientDisconnect: gone, Exception: defect}
