"""The HTTP API: every endpoint against bad input, statuses, error bodies, paging, keys, metrics."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.parse
from typing import Any

import pytest

from tidemill.core.clock import ManualClock
from tidemill.core.errors import SandboxError
from tidemill.sandbox.api.errors import STATUS, error_body, error_from_answer, error_from_body, status_of
from tidemill.sandbox.wire import Address, Answer, ConnectionPool

ID = "ID"
"""Stands for a running sandbox in paths below."""
S, X = f"/sandboxes/{ID}", f"/x/v1/sandboxes/{ID}"
DEEP = b"[" * 200_000

BAD: list[tuple[str, str, bytes | dict[str, Any], int, str]] = [
    # create
    ("POST", "/sandboxes", b"{", 400, "JSON"),
    ("POST", "/sandboxes", b"\xff\xfe", 400, "JSON"),
    ("POST", "/sandboxes", b'{"metadata": {"a": "\\ud800"}}', 400, "JSON"),
    ("POST", "/sandboxes", DEEP, 400, "JSON"),
    ("POST", "/sandboxes", b"[]", 400, "body"),
    ("POST", "/sandboxes", b"null", 400, "body"),
    ("POST", "/sandboxes", b" " * (1 << 20) + b"{}", 413, "larger"),
    ("POST", "/sandboxes", {"colour": 1}, 400, "colour: unknown field"),
    ("POST", "/sandboxes", {"template": "base"}, 400, "template: unknown field"),
    ("POST", "/sandboxes", {"templateID": "none"}, 404, "no template 'none'"),
    ("POST", "/sandboxes", {"templateID": ""}, 400, "templateID"),
    ("POST", "/sandboxes", {"templateID": "../../etc"}, 400, "templateID"),
    ("POST", "/sandboxes", {"templateID": 7}, 400, "templateID"),
    ("POST", "/sandboxes", {"backend": "none"}, 404, "no backend 'none'"),
    ("POST", "/sandboxes", {"lease": "none"}, 404, "no lease 'none'"),
    ("POST", "/sandboxes", {"timeout": 0}, 400, "timeout"),
    ("POST", "/sandboxes", {"timeout": -1}, 400, "timeout"),
    ("POST", "/sandboxes", {"timeout": "60"}, 400, "timeout"),
    ("POST", "/sandboxes", {"timeout": True}, 400, "timeout"),
    ("POST", "/sandboxes", {"timeout": 1e9}, 400, "timeout"),
    ("POST", "/sandboxes", b'{"timeout": NaN}', 400, "timeout"),
    ("POST", "/sandboxes", b'{"timeout": 1e999}', 400, "timeout"),
    ("POST", "/sandboxes", {"metadata": {"a": 1}}, 400, "metadata.a"),
    ("POST", "/sandboxes", {"metadata": {"a": "x" * 9000}}, 400, "8192"),
    ("POST", "/sandboxes", {"metadata": {str(i): "" for i in range(65)}}, 400, "64"),
    ("POST", "/sandboxes", {"metadata": {"a": "\0"}}, 400, "NUL"),
    ("POST", "/v2/sandboxes", {"secure": True}, 400, "secure: unknown field"),
    ("POST", "/x/v1/sandboxes/batch", {}, 400, "count: required"),
    ("POST", "/x/v1/sandboxes/batch", {"count": 0}, 400, "count"),
    ("POST", "/x/v1/sandboxes/batch", {"count": 513}, 400, "count"),
    ("POST", "/x/v1/sandboxes/batch", {"count": 100}, 409, "limit"),
    ("POST", "/x/v1/sandboxes/batch", {"count": 1.5}, 400, "count"),
    # list, get, delete
    ("GET", "/v2/sandboxes?limit=0", b"", 400, "limit"),
    ("GET", "/v2/sandboxes?limit=101", b"", 400, "limit"),
    ("GET", "/v2/sandboxes?limit=x", b"", 400, "limit"),
    ("GET", "/v2/sandboxes?state=running,asleep", b"", 400, "asleep"),
    ("GET", "/v2/sandboxes?nextToken=%FF", b"", 400, "nextToken"),
    ("GET", "/v2/sandboxes?nextToken=abcd", b"", 400, "nextToken"),
    ("GET", "/v2/sandboxes?colour=1", b"", 400, "colour"),
    ("GET", "/sandboxes?limit=1", b"", 400, "limit"),
    ("GET", "/sandboxes/sbx-none", b"", 404, "sbx-none"),
    ("GET", "/sandboxes/%2e%2e", b"", 404, ""),
    ("GET", "/sandboxes/" + "a" * 5000, b"", 404, ""),
    ("DELETE", "/sandboxes/sbx-none", b"", 404, "sbx-none"),
    ("PUT", "/sandboxes", b"", 405, "PUT"),
    ("GET", "/nowhere", b"", 404, "nowhere"),
    # timeout, pause, resume, fork, reset
    ("POST", f"{S}/timeout", {}, 400, "timeout: required"),
    ("POST", f"{S}/timeout", {"timeout": -5}, 400, "timeout"),
    ("POST", "/sandboxes/sbx-none/timeout", {"timeout": 5}, 404, "sbx-none"),
    ("POST", f"{S}/pause", {"memory": True}, 400, "memory: unknown field"),
    ("POST", "/sandboxes/sbx-none/pause", {}, 404, "sbx-none"),
    ("POST", f"{S}/resume", {}, 409, "already running"),
    ("POST", f"{S}/resume", {"timeout": 0}, 400, "timeout"),
    ("POST", f"{S}/fork", {"count": 0}, 400, "count"),
    ("POST", f"{S}/fork", {"count": 101}, 400, "count"),
    ("POST", f"{S}/fork", {"count": "two"}, 400, "count"),
    ("POST", f"{S}/fork", {"count": 100}, 409, "limit"),
    ("POST", "/sandboxes/sbx-none/fork", {}, 404, "sbx-none"),
    ("POST", f"{X}/reset", {"hard": True}, 400, "hard: unknown field"),
    ("POST", "/x/v1/sandboxes/sbx-none/reset", {}, 404, "sbx-none"),
    # exec
    ("POST", f"{X}/exec", {}, 400, "argv: required"),
    ("POST", f"{X}/exec", {"argv": []}, 400, "argv"),
    ("POST", f"{X}/exec", {"argv": "ls"}, 400, "argv"),
    ("POST", f"{X}/exec", {"argv": ["a\0b"]}, 400, "NUL"),
    ("POST", f"{X}/exec", {"argv": ["no-such-program"]}, 400, "no-such-program"),
    ("POST", f"{X}/exec", {"argv": ["true"], "stdin": "%%%"}, 400, "base64"),
    ("POST", f"{X}/exec", {"argv": ["true"], "stdin": "é"}, 400, "base64"),
    ("POST", f"{X}/exec", {"argv": ["true"], "env": {"A=B": "1"}}, 400, "A=B"),
    ("POST", f"{X}/exec", {"argv": ["true"], "env": {"A": "x" * 70_000}}, 400, "65536"),
    ("POST", f"{X}/exec", {"argv": ["true"], "user": "Root;"}, 400, "user"),
    ("POST", f"{X}/exec", {"argv": ["true"], "timeout": 0}, 400, "timeout"),
    ("POST", f"{X}/exec", {"argv": ["true"], "maxOutputBytes": -1}, 400, "maxOutputBytes"),
    ("POST", f"{X}/exec", {"argv": ["true"], "maxOutputBytes": 1 << 40}, 400, "maxOutputBytes"),
    ("POST", f"{X}/exec", {"argv": ["true"], "max_output_bytes": 1}, 400, "max_output_bytes: unknown"),
    ("POST", "/x/v1/sandboxes/sbx-none/exec", {"argv": ["true"]}, 404, "sbx-none"),
    # sessions
    ("POST", f"{X}/sessions", {"kind": "ruby"}, 400, "kind"),
    ("POST", "/x/v1/sandboxes/sbx-none/sessions", {}, 404, "sbx-none"),
    ("GET", "/x/v1/sandboxes/sbx-none/sessions", b"", 404, "sbx-none"),
    ("POST", f"{X}/sessions/ses-none/run", {"code": "1"}, 404, "ses-none"),
    ("POST", f"{X}/sessions/ses-none/run", {}, 400, "code: required"),
    ("POST", f"{X}/sessions/ses-none/run", {"code": 1}, 400, "code"),
    ("DELETE", f"{X}/sessions/ses-none", b"", 404, "ses-none"),
    # files
    ("GET", f"{X}/files", b"", 400, "path"),
    ("GET", f"{X}/files?path=relative", b"", 400, "path"),
    ("GET", f"{X}/files?path=/a%00b", b"", 400, "path"),
    ("GET", f"{X}/files?path=/{'a' * 5000}", b"", 400, "path"),
    ("GET", f"{X}/files?path=/none", b"", 404, "/none"),
    ("GET", f"{X}/files?path=/none&maxBytes=-1", b"", 400, "maxBytes"),
    ("GET", f"{X}/files?path=/none&colour=1", b"", 400, "colour"),
    ("PUT", f"{X}/files?path=/a&mode=999", b"", 400, "mode"),
    ("PUT", f"{X}/files?path=/a&mode=-1", b"", 400, "mode"),
    ("PUT", f"{X}/files?path=/folder/", b"x", 400, "folder"),
    ("PUT", "/x/v1/sandboxes/sbx-none/files?path=/a", b"x", 404, "sbx-none"),
    # leases, events, capabilities
    ("POST", "/x/v1/leases", {}, 400, "lease: required"),
    ("POST", "/x/v1/leases", {"lease": "a"}, 400, "ownerPid"),
    ("POST", "/x/v1/leases", {"lease": "", "ttl": 5}, 400, "lease"),
    ("POST", "/x/v1/leases", {"lease": "a", "ttl": -5}, 400, "ttl"),
    ("POST", "/x/v1/leases", {"lease": "a", "ownerPid": 0}, 400, "ownerPid"),
    ("POST", "/x/v1/leases", {"lease": "a", "ownerPid": 1 << 30}, 400, "no such process"),
    ("POST", "/x/v1/leases/none/heartbeat", {}, 404, "none"),
    ("GET", "/x/v1/events?cursor=-1", b"", 400, "cursor"),
    ("GET", "/x/v1/events?limit=0", b"", 400, "limit"),
    ("GET", "/x/v1/capabilities?backend=none", b"", 404, "none"),
    ("GET", "/x/v1/capacity?a=b", b"", 400, "a"),
]


async def ask(pool: ConnectionPool, method: str, path: str, body: bytes | dict[str, Any] = b"") -> Answer:
    return await pool.request(method, path, json.dumps(body).encode() if isinstance(body, dict) else body)


def test_bad_input_is_refused_by_name_and_never_a_500(fake_service) -> None:
    async def main() -> None:
        async with fake_service(max_sandboxes=50) as (client, orchestrator):
            pool = ConnectionPool(client.address)
            sandbox = await client.create()
            wrong: list[str] = []
            for method, path, body, status, word in BAD:
                answer = await ask(pool, method, path.replace(ID, sandbox.sandbox_id), body)
                said = json.loads(answer.body)
                if (answer.status, said["code"]) != (status, status) or word not in said["message"] + said["remedy"]:
                    wrong.append(f"{method} {path[:60]} {str(body)[:60]}: {answer.status} {said}")
                assert set(said) - {"field"} == {"code", "message", "remedy", "type"}
                assert answer.headers["should-retry"] == ("true" if status == 409 else "false")
            assert wrong == []
            assert [e.row.sandbox_id for e in orchestrator.entries.values()] == [sandbox.sandbox_id]
            assert (await sandbox.exec(["true"])).exit_code == 0
            await pool.close()

    asyncio.run(main())


def test_every_route_is_in_the_table_of_bad_input(fake_service) -> None:
    from tidemill.sandbox.api.app import build_app

    async def main() -> None:
        async with fake_service() as (_, orchestrator):
            app = build_app(orchestrator)
            tried = {(m, urllib.parse.urlparse(p.replace(ID, "sbx-1")).path) for m, p, *_ in BAD}
            unprobed: list[str] = []
            for route in app.routes:
                pattern = route.path_regex  # type: ignore[attr-defined]
                unprobed += [f"{method} {route.path}"  # type: ignore[attr-defined]
                             for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
                             if not any(m == method and pattern.match(p) for m, p in tried)]
            # These take no input that could be wrong, or accept any (release is idempotent).
            assert sorted(unprobed) == ["DELETE /x/v1/leases/{lease:path}", "GET /health", "GET /metrics",
                                        "GET /x/v1/leases"]

    asyncio.run(main())


def test_ended_sandboxes_are_404_for_e2b_and_410_for_us(fake_service) -> None:
    async def main() -> None:
        async with fake_service() as (client, _):
            pool = ConnectionPool(client.address)
            sandbox = await client.create()
            assert (await ask(pool, "DELETE", f"/sandboxes/{sandbox.sandbox_id}")).status == 204
            for method, path, status in (("DELETE", "/sandboxes/{}", 404), ("GET", "/sandboxes/{}", 404),
                                         ("POST", "/sandboxes/{}/pause", 404),
                                         ("POST", "/x/v1/sandboxes/{}/reset", 410)):
                answer = await ask(pool, method, path.format(sandbox.sandbox_id))
                assert answer.status == status
                assert json.loads(answer.body)["type"] == "SandboxDiedError"
            await pool.close()

    asyncio.run(main())


def test_shapes_and_paging_follow_e2b(fake_service) -> None:
    async def main() -> None:
        async with fake_service() as (client, orchestrator):
            orchestrator.clock = ManualClock()
            pool = ConnectionPool(client.address)
            ids: list[str] = []
            for n in range(7):
                orchestrator.clock.advance(n // 2)  # some share a creation time
                made = json.loads((await ask(pool, "POST", "/sandboxes", {"metadata": {"n o&": f"ü {n % 2}"}})).body)
                ids.append(made["sandboxID"])
            assert set(made) >= {"templateID", "sandboxID", "clientID", "state", "startedAt", "endAt", "metadata"}
            assert made["state"] == "running"
            await ask(pool, "POST", f"/sandboxes/{ids[6]}/pause")
            seen: list[str] = []
            target = "/v2/sandboxes?limit=3"
            while True:
                answer = await ask(pool, "GET", target)
                page = json.loads(answer.body)
                seen += [s["sandboxID"] for s in page]
                if "x-next-token" not in answer.headers:
                    break
                assert len(page) == 3
                await client.connect(page[-1]["sandboxID"])
                await ask(pool, "DELETE", f"/sandboxes/{page[-1]['sandboxID']}")
                target = f"/v2/sandboxes?limit=3&nextToken={urllib.parse.quote(answer.headers['x-next-token'])}"
            assert sorted(seen) == sorted(ids)
            states = {s["sandboxID"]: s["state"] for s in json.loads((await ask(pool, "GET", "/v2/sandboxes")).body)}
            assert states[ids[6]] == "paused"
            paused = json.loads((await ask(pool, "GET", "/v2/sandboxes?state=paused")).body)
            assert [s["sandboxID"] for s in paused] == [ids[6]]
            # As the SDK sends it: each part quoted, then a form, then a query.
            form = urllib.parse.urlencode({urllib.parse.quote("n o&"): urllib.parse.quote("ü 1")})
            query = urllib.parse.urlencode({"metadata": form})
            found = json.loads((await ask(pool, "GET", f"/v2/sandboxes?{query}")).body)
            assert {s["sandboxID"] for s in found} == {i for i in ids[1::2] if i in states}
            assert len(found) > 0
            await pool.close()

    asyncio.run(main())


def test_tcp_needs_the_key_and_the_unix_socket_its_mode(fake_service, state_dir) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = "k" * 40

    async def main() -> None:
        async with fake_service(port=port, api_key=key):
            assert (state_dir / "daemon.sock").stat().st_mode & 0o777 == 0o600
            assert (state_dir / "store.sqlite").stat().st_mode & 0o777 == 0o600
            for given, status in (("", 401), ("wrong" * 8, 401), (key, 200)):
                pool = ConnectionPool(Address(port=port, api_key=given))
                assert (await ask(pool, "GET", "/sandboxes")).status == status
                assert (await ask(pool, "GET", "/health")).status == 200
                await pool.close()
            twice = ConnectionPool(Address(port=port, api_key=f"{key}\r\nX-API-Key: {key}"))
            assert (await ask(twice, "GET", "/sandboxes")).status == 401
            await twice.close()

    asyncio.run(main())


def test_metrics_events_capacity_and_health(fake_service) -> None:
    async def main() -> None:
        async with fake_service(max_sandboxes=10, heavy_slots=3) as (client, _):
            pool = ConnectionPool(client.address)
            sandbox = await client.create()
            await sandbox.exec(["true"])
            await sandbox.pause()
            text = (await ask(pool, "GET", "/metrics")).body.decode()
            assert 'tidemill_sandbox_operation_seconds_count{operation="create"} 1.0' in text
            assert 'tidemill_sandbox_call_seconds_count{call="exec"} 1.0' in text
            assert 'tidemill_sandbox_alive{state="paused"} 1.0' in text
            await sandbox.kill()
            events = json.loads((await ask(pool, "GET", "/x/v1/events?limit=2")).body)
            assert [e["kind"] for e in events["events"]] == ["created", "paused"]
            events = json.loads((await ask(pool, "GET", f"/x/v1/events?cursor={events['cursor']}")).body)
            assert [(e["kind"], e["detail"]) for e in events["events"]] == [("killed", "killed")]
            capacity = json.loads((await ask(pool, "GET", "/x/v1/capacity")).body)
            assert capacity == {"maxSandboxes": 10, "alive": 0, "free": 10, "workers": 3, "active": 0, "waiting": 0}
            health = await client.health()
            assert (health["status"], health["generation"], health["sandboxes"]) == ("ok", 1, 0)
            await pool.close()

    asyncio.run(main())


def test_errors_cross_the_wire_as_what_they_are() -> None:
    for cls in STATUS:
        error = cls("what", remedy="do this")
        back = error_from_body(error_body(error))
        assert isinstance(error, type(back))
        assert (back.message, back.remedy, type(back).__module__) == ("what", "do this", "tidemill.core.errors")
        assert status_of(error) == error_body(error)["code"]
    strange = error_from_answer(502, b"<html>")
    assert isinstance(strange, SandboxError)
    assert "502" in strange.message


def test_a_cut_connection_and_a_strange_answer_are_errors(state_dir) -> None:
    answers = [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab",
               b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nabc"]

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answers.pop(0))
            await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(serve, state_dir / "daemon.sock")
        pool = ConnectionPool(Address(socket=state_dir / "daemon.sock"))
        for _ in range(len(answers)):
            with pytest.raises(SandboxError):
                await pool.request("GET", "/")
        server.close()
        await server.wait_closed()
        (state_dir / "daemon.sock").unlink()
        with pytest.raises(SandboxError, match="no sandbox service answers"):
            await pool.request("GET", "/")
        await pool.close()
        with pytest.raises(SandboxError, match="closed"):
            await pool.request("GET", "/")

    asyncio.run(main())
