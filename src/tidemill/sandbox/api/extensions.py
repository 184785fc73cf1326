"""What E2B's control plane does not have, under /x/v1: commands, live sessions, files, reset, batches,
leases, events, capabilities, capacity."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.core.errors import NotFoundError, TidemillError
from tidemill.sandbox.api.control import MAX_BODY_BYTES, spec_of
from tidemill.sandbox.api.exchange import (
    exec_json,
    json_response,
    or_undo,
    read_body,
    sandbox_or_error,
    while_connected,
)
from tidemill.sandbox.api.schema import (
    MAX_FILE_BYTES,
    MAX_JSON_BYTES,
    BatchBody,
    EmptyBody,
    ExecBody,
    LeaseBody,
    OpenSessionBody,
    RunBody,
    check_query,
    decode_base64,
    parse_body,
    query_int,
    query_path,
)
from tidemill.sandbox.leases import Joined
from tidemill.sandbox.orchestrator import Orchestrator
from tidemill.sandbox.store import LeaseRow, SandboxRow
from tidemill.sandbox.usage import Usage


class Extensions:
    """Handlers over one orchestrator and its use."""

    def __init__(self, orchestrator: Orchestrator, usage: Usage) -> None:
        self._orchestrator = orchestrator
        self._usage = usage

    def routes(self) -> list[Route]:
        """The busiest first: routing goes down the list."""
        one = "/x/v1/sandboxes/{id}"
        return [
            Route(f"{one}/sessions/{{session}}/run", self.run, methods=["POST"]),
            Route(f"{one}/exec", self.exec, methods=["POST"]),
            Route(f"{one}/sessions", self.open_session, methods=["POST"]),
            Route(f"{one}/sessions", self.list_sessions, methods=["GET"]),
            Route(f"{one}/sessions/{{session}}", self.close_session, methods=["DELETE"]),
            Route(f"{one}/reset", self.reset, methods=["POST"]),
            Route(f"{one}/files", self.read_file, methods=["GET"]),
            Route(f"{one}/files", self.write_file, methods=["PUT"]),
            Route("/x/v1/sandboxes/batch", self.batch, methods=["POST"]),
            Route("/x/v1/leases", self.join_lease, methods=["POST"]),
            Route("/x/v1/leases", self.list_leases, methods=["GET"]),
            Route("/x/v1/leases/{lease:path}/heartbeat", self.heartbeat, methods=["POST"]),
            Route("/x/v1/leases/{lease:path}", self.release, methods=["DELETE"]),
            Route("/x/v1/events", self.events, methods=["GET"]),
            Route("/x/v1/capabilities", self.capabilities, methods=["GET"]),
            Route("/x/v1/capacity", self.capacity, methods=["GET"]),
        ]

    # ---- using a sandbox

    async def run(self, request: Request) -> Response:
        body = parse_body(RunBody, await read_body(request, MAX_JSON_BYTES))
        path = request.path_params
        result = await while_connected(request, self._usage.run(
            path["id"], path["session"], body.code, timeout_s=body.timeout, max_output_bytes=body.max_output_bytes))
        return json_response(exec_json(result))

    async def exec(self, request: Request) -> Response:
        body = parse_body(ExecBody, await read_body(request, MAX_JSON_BYTES))
        result = await while_connected(request, self._usage.exec(
            request.path_params["id"], body.argv, stdin=decode_base64("stdin", body.stdin), env=body.env, cwd=body.cwd,
            user=body.user, timeout_s=body.timeout, max_output_bytes=body.max_output_bytes))
        return json_response(exec_json(result))

    async def open_session(self, request: Request) -> Response:
        body = parse_body(OpenSessionBody, await read_body(request, MAX_BODY_BYTES))
        session_id = await self._usage.open_session(request.path_params["id"], body.kind)
        return json_response({"sessionID": session_id, "kind": body.kind}, 201)

    async def list_sessions(self, request: Request) -> Response:
        found = self._usage.sessions(request.path_params["id"])
        return json_response([{"sessionID": session_id, "kind": kind} for session_id, kind in found])

    async def close_session(self, request: Request) -> Response:
        path = request.path_params
        if not await self._usage.close_session(path["id"], path["session"]):
            raise NotFoundError(f"{path['id']} has no session {path['session']!r}.")
        return Response(status_code=204)

    async def read_file(self, request: Request) -> Response:
        query = request.query_params
        check_query(query, ("path", "maxBytes"))
        data = await while_connected(request, self._usage.read_file(
            request.path_params["id"], query_path(query),
            max_bytes=query_int(query, "maxBytes", default=1 << 24, low=0, high=MAX_FILE_BYTES)))
        return Response(data, media_type="application/octet-stream")

    async def write_file(self, request: Request) -> Response:
        query = request.query_params
        check_query(query, ("path", "mode"))
        path, mode = query_path(query), query_int(query, "mode", default=0o644, low=0, high=0o777, base=8)
        data = await read_body(request, MAX_FILE_BYTES)
        await while_connected(request, self._usage.write_file(request.path_params["id"], path, data, mode=mode))
        return Response(status_code=204)

    async def reset(self, request: Request) -> Response:
        parse_body(EmptyBody, await read_body(request, MAX_BODY_BYTES))
        done = await self._orchestrator.reset(request.path_params["id"])
        return json_response({"how": done.how, "generation": done.row.generation, "detail": done.detail})

    async def batch(self, request: Request) -> Response:
        body = parse_body(BatchBody, await read_body(request, MAX_BODY_BYTES))
        work = self._orchestrator.create_many(spec_of(body, 300.0), body.count)
        done = await or_undo(request, self._orchestrator, work, _rows)
        return json_response([sandbox_or_error(d) for d in done], 201)

    # ---- leases

    async def join_lease(self, request: Request) -> Response:
        body = parse_body(LeaseBody, await read_body(request, MAX_BODY_BYTES))
        joined = self._orchestrator.leases.join(body.lease, owner_pid=body.owner_pid, owner_start=body.owner_start,
                                                ttl_s=body.ttl)
        return json_response(self._joined_json(joined), 201 if joined.how == "created" else 200)

    async def list_leases(self, request: Request) -> Response:
        check_query(request.query_params, ())
        return json_response([self._lease_json(row) for row in self._orchestrator.leases.rows()])

    async def heartbeat(self, request: Request) -> Response:
        parse_body(EmptyBody, await read_body(request, MAX_BODY_BYTES))
        return json_response(self._lease_json(self._orchestrator.leases.heartbeat(request.path_params["lease"])))

    async def release(self, request: Request) -> Response:
        lease = request.path_params["lease"]
        ended = await self._orchestrator.release_lease(lease)
        return json_response({"lease": lease, "ended": ended})

    def _joined_json(self, joined: Joined) -> dict[str, object]:
        return self._lease_json(joined.row) | {"how": joined.how}

    def _lease_json(self, row: LeaseRow) -> dict[str, object]:
        return {"lease": row.lease, "ownerPid": row.owner_pid, "ownerStart": row.owner_start, "ttl": row.ttl_s,
                "createdAt": row.created_at, "heartbeatAt": row.heartbeat_at, "lostAt": row.lost_at,
                "sandboxes": len(self._orchestrator.rows(lease=row.lease))}

    # ---- looking

    async def events(self, request: Request) -> Response:
        query = request.query_params
        check_query(query, ("cursor", "limit"))
        after = query_int(query, "cursor", default=0, low=0, high=(1 << 63) - 1)
        found = self._orchestrator.store.events(after, query_int(query, "limit", default=100, low=1, high=1000))
        rows = [{"seq": e.seq, "at": e.at, "sandboxID": e.sandbox_id, "lease": e.lease, "kind": e.kind,
                 "detail": e.detail} for e in found]
        return json_response({"events": rows, "cursor": found[-1].seq if found else after})

    async def capabilities(self, request: Request) -> Response:
        query = request.query_params
        check_query(query, ("backend",))
        chosen = self._orchestrator.backend(query.get("backend", ""))
        record = chosen.capabilities()
        return json_response({
            "backend": record.backend, "isolation": record.isolation, "pause": record.pause,
            "snapshot": record.snapshot, "fork": record.fork, "cowMemory": record.cow_memory,
            "externalTcp": record.external_tcp,
            "survivesDaemon": record.survives_daemon, "detail": dict(record.detail),
            "templates": list(await chosen.templates()), "backends": sorted(self._orchestrator.backends),
        })

    async def capacity(self, request: Request) -> Response:
        check_query(request.query_params, ())
        orchestrator = self._orchestrator
        alive = len(orchestrator.entries)
        return json_response({
            "maxSandboxes": orchestrator.config.max_sandboxes, "alive": alive,
            "free": max(0, orchestrator.config.max_sandboxes - alive), "workers": orchestrator.heavy.workers,
            "active": orchestrator.heavy.active, "waiting": orchestrator.heavy.waiting,
        })


def _rows(made: list[SandboxRow | TidemillError]) -> list[SandboxRow]:
    return [r for r in made if isinstance(r, SandboxRow)]
