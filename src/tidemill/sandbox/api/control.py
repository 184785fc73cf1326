"""The control plane under E2B's paths: create, list, get, delete, timeout, pause, resume, fork."""

from __future__ import annotations

import base64
import binascii
from datetime import UTC, datetime
from urllib.parse import parse_qsl, unquote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.core.errors import InputError, SandboxDiedError
from tidemill.core.sandbox_api import SandboxState
from tidemill.sandbox.api.exchange import json_response, or_undo, read_body, sandbox_json, sandbox_or_error
from tidemill.sandbox.api.schema import (
    CreateBody,
    EmptyBody,
    ForkBody,
    ResumeBody,
    TimeoutBody,
    check_query,
    parse_body,
    query_int,
)
from tidemill.sandbox.orchestrator import CreateSpec, Orchestrator
from tidemill.sandbox.store import SandboxRow

MAX_BODY_BYTES = 1 << 20


def spec_of(body: CreateBody, default_timeout_s: float) -> CreateSpec:
    """What a create body asks for."""
    return CreateSpec(template=body.template, backend=body.backend, lease=body.lease, metadata=body.metadata,
                      timeout_s=default_timeout_s if body.timeout is None else body.timeout)


class Control:
    """Handlers over one orchestrator."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def routes(self) -> list[Route]:
        one = "/sandboxes/{id}"
        return [
            Route("/sandboxes", self.create_v1, methods=["POST"]),
            Route("/v2/sandboxes", self.create_v2, methods=["POST"]),
            Route("/sandboxes", self.list_v1, methods=["GET"]),
            Route("/v2/sandboxes", self.list_v2, methods=["GET"]),
            Route(one, self.get, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/timeout", self.timeout, methods=["POST"]),
            Route(f"{one}/pause", self.pause, methods=["POST"]),
            Route(f"{one}/resume", self.resume, methods=["POST"]),
            Route(f"{one}/fork", self.fork, methods=["POST"]),
        ]

    async def create_v1(self, request: Request) -> Response:
        return await self._create(request, default_timeout_s=15.0)

    async def create_v2(self, request: Request) -> Response:
        return await self._create(request, default_timeout_s=300.0)

    async def _create(self, request: Request, *, default_timeout_s: float) -> Response:
        body = parse_body(CreateBody, await read_body(request, MAX_BODY_BYTES))
        spec = spec_of(body, default_timeout_s)
        row = await or_undo(request, self._orchestrator, self._orchestrator.create(spec), lambda made: [made])
        return json_response(sandbox_json(row), 201)

    async def list_v1(self, request: Request) -> Response:
        check_query(request.query_params, ("metadata", "lease"))
        rows = [r for r in self._listed(request) if r.state is not SandboxState.PAUSED]
        return json_response([sandbox_json(r) for r in rows])

    async def list_v2(self, request: Request) -> Response:
        query = request.query_params
        check_query(query, ("metadata", "lease", "state", "limit", "nextToken"))
        states = set(query.get("state", "running,paused").split(","))
        if bad := states - {"running", "paused"}:
            raise InputError(f"state = {sorted(bad)[0]!r}: expected running, paused or both.", field="state")
        limit = query_int(query, "limit", default=100, low=1, high=100)
        rows = [r for r in self._listed(request) if sandbox_json(r)["state"] in states]
        if token := query.get("nextToken"):
            after = _read_cursor(token)
            rows = [r for r in rows if _position(r) > after]
        page = rows[:limit]
        headers = {"x-next-token": _cursor(page[-1])} if len(rows) > limit else None
        return json_response([sandbox_json(r) for r in page], 200, headers)

    def _listed(self, request: Request) -> list[SandboxRow]:
        """Matching rows, newest first, ties by id."""
        query = request.query_params
        wanted = _metadata_filter(query.get("metadata", ""))
        rows = self._orchestrator.rows(lease=query.get("lease", ""), metadata=wanted)
        return sorted(rows, key=_position)

    async def get(self, request: Request) -> Response:
        return json_response(sandbox_json(self._orchestrator.entry(request.path_params["id"]).row))

    async def delete(self, request: Request) -> Response:
        sandbox_id = request.path_params["id"]
        if not await self._orchestrator.kill(sandbox_id):
            raise SandboxDiedError(f"sandbox {sandbox_id} had ended before.")
        return Response(status_code=204)

    async def timeout(self, request: Request) -> Response:
        body = parse_body(TimeoutBody, await read_body(request, MAX_BODY_BYTES))
        self._orchestrator.set_timeout(request.path_params["id"], body.timeout)
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        parse_body(EmptyBody, await read_body(request, MAX_BODY_BYTES))
        await self._orchestrator.pause(request.path_params["id"])
        return Response(status_code=204)

    async def resume(self, request: Request) -> Response:
        body = parse_body(ResumeBody, await read_body(request, MAX_BODY_BYTES))
        row = await self._orchestrator.resume(request.path_params["id"], timeout_s=body.timeout)
        return json_response(sandbox_json(row), 201)

    async def fork(self, request: Request) -> Response:
        body = parse_body(ForkBody, await read_body(request, MAX_BODY_BYTES))
        work = self._orchestrator.fork(request.path_params["id"], body.count, timeout_s=body.timeout)
        done = await or_undo(request, self._orchestrator, work,
                             lambda made: [r for r in made if isinstance(r, SandboxRow)])
        return json_response([sandbox_or_error(d) for d in done], 201)


def _metadata_filter(text: str) -> dict[str, str]:
    """E2B's clients quote keys and values, then encode the pairs as a form, then the whole as a query; the
    query layer is gone when we see it. Empty keys and values are ignored."""
    pairs = parse_qsl(text, keep_blank_values=False)
    return {unquote(k): unquote(v) for k, v in pairs if k and v}


def _position(row: SandboxRow) -> tuple[int, str]:
    return -round(row.created_at * 1e6), row.sandbox_id


def _cursor(row: SandboxRow) -> str:
    micros = round(row.created_at * 1e6)
    moment = datetime.fromtimestamp(micros // 1_000_000, UTC)
    text = f"{moment:%Y-%m-%dT%H:%M:%S}.{micros % 1_000_000:06d}000Z__{row.sandbox_id}"
    return base64.urlsafe_b64encode(text.encode()).decode()


def _read_cursor(token: str) -> tuple[int, str]:
    """The position a token stands for. Raises InputError."""
    try:
        stamp, separator, sandbox_id = base64.urlsafe_b64decode(token.encode()).decode("ascii").partition("__")
        if not separator:
            raise ValueError("no separator")
        moment = datetime.fromisoformat(stamp[:26] + "+00:00")
    except (binascii.Error, ValueError) as e:
        raise InputError("nextToken is not one this service gave out.", field="nextToken") from e
    return -round(moment.timestamp() * 1e6), sandbox_id
