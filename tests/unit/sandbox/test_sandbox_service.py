"""Callers who go away, many at once, operations that meet each other, and services that stop in the middle."""

from __future__ import annotations

import asyncio
import json

import pytest

from tidemill.core.errors import (
    BusyError,
    InputError,
    MissingCapabilityError,
    NotFoundError,
    SandboxDiedError,
    SandboxError,
)
from tidemill.sandbox import entry as entry_module
from tidemill.sandbox.client import LocalSandbox


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_caller_that_dies_while_a_batch_is_made_leaves_nothing(fake_service, machine, state_dir) -> None:
    async def main() -> None:
        machine.delay_s = 0.02
        async with fake_service() as (client, orchestrator):
            _, writer = await asyncio.open_unix_connection(state_dir / "daemon.sock")
            body = json.dumps({"count": 8}).encode()
            head = b"POST /x/v1/sandboxes/batch HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            await writer.drain()
            await until(lambda: len(machine.boxes) >= 2)
            writer.transport.abort()
            await until(lambda: not orchestrator.entries)
            assert machine.boxes == {}
            events = (await client.call("GET", "/x/v1/events"))["events"]
            assert {e["detail"] for e in events if e["kind"] == "killed"} == {
                "the caller went away before it was created"}

    asyncio.run(main())


def test_releasing_a_lease_overtakes_its_queued_creates(fake_service, machine) -> None:
    async def main() -> None:
        machine.delay_s = 0.05
        async with fake_service(heavy_slots=1) as (client, orchestrator):
            batch = asyncio.create_task(client.create_many(50, lease="run"))
            await until(lambda: len(machine.boxes) == 2)
            assert await client.release_lease("run") == 50
            made = await batch
            assert machine.boxes == {}
            assert orchestrator.entries == {}
            failed = [m for m in made if not isinstance(m, LocalSandbox)]
            assert len(failed) >= 45
            assert all("lease released" in str(m) for m in failed)

    asyncio.run(main())


def test_a_small_lease_does_not_wait_for_a_large_one(fake_service, machine) -> None:
    async def main() -> None:
        machine.delay_s = 0.01
        async with fake_service(heavy_slots=1) as (client, _):
            large = asyncio.create_task(client.create_many(40, lease="large"))
            await until(lambda: len(machine.boxes) >= 2)
            await client.create(lease="small")
            assert len(machine.boxes) < 15
            assert all(isinstance(m, LocalSandbox) for m in await large)

    asyncio.run(main())


def test_one_failed_copy_does_not_harm_the_others(fake_service, machine) -> None:
    async def main() -> None:
        async with fake_service() as (client, _):
            sandbox = await client.create()
            session = await sandbox.open_session("python")
            await session.run("x = 7")
            calls = iter([None, SandboxError("no memory"), None, None, SandboxError("no memory"), None])

            def fault(point: str) -> None:
                if point == "fork_child" and (error := next(calls)):
                    raise error

            machine.fault = fault
            made = await sandbox.try_fork(3)
            assert [isinstance(m, LocalSandbox) for m in made] == [True, False, True]
            assert str(made[1]) == "no memory"
            for child in (made[0], made[2]):
                assert isinstance(child, LocalSandbox)
                (inherited,) = await child.sessions()
                assert (await inherited.run("print(x)")).text == "7\n"
            with pytest.raises(SandboxError, match="no memory"):
                await sandbox.fork(3)
            assert len(await client.list()) == 3
            assert len(machine.boxes) == 3

    asyncio.run(main())


def test_what_is_too_large_is_refused_before_it_is_sent(fake_service) -> None:
    async def main() -> None:
        async with fake_service() as (client, _):
            sandbox = await client.create()
            with pytest.raises(InputError, match="data has 268435457 bytes"):
                await sandbox.write_file("/f", bytes((256 << 20) + 1))
            with pytest.raises(InputError, match="stdin"):
                await sandbox.exec(["cat"], stdin=bytes((16 << 20) + 1))
            big = bytes(range(256)) * (8 << 12)
            assert (await sandbox.exec(["cat"], stdin=big, max_output_bytes=len(big))).stdout == big

    asyncio.run(main())


def test_missing_capabilities_are_errors_before_anything_is_done(fake_service, machine) -> None:
    async def main() -> None:
        machine.can_pause = machine.can_fork = False
        async with fake_service() as (client, orchestrator):
            sandbox = await client.create()
            with pytest.raises(MissingCapabilityError, match="cannot pause"):
                await sandbox.pause()
            with pytest.raises(MissingCapabilityError, match="cannot fork"):
                await sandbox.fork()
            assert orchestrator.store.open_operations() == []
            assert (await sandbox.exec(["true"])).exit_code == 0

    asyncio.run(main())


def test_uses_wait_for_operations_and_give_up_in_time(fake_service, machine, monkeypatch) -> None:
    async def main() -> None:
        async with fake_service() as (client, orchestrator):
            sandbox = await client.create()
            entry = orchestrator.entry(sandbox.sandbox_id)
            async with entry.alone("test"):
                waiting = [asyncio.create_task(sandbox.exec(["echo", "1"])), asyncio.create_task(sandbox.reset_how())]
                await asyncio.sleep(0.05)
                assert not any(w.done() for w in waiting)
            assert (await waiting[0]).text == "1\n"
            assert await waiting[1] == "in_guest"
            monkeypatch.setattr(entry_module, "WAIT_S", 0.05)
            async with entry.alone("test"):
                for call in (sandbox.exec(["true"]), sandbox.pause(), sandbox.fork()):
                    with pytest.raises(BusyError, match=r"0\.05 s"):
                        await call

    asyncio.run(main())


def test_a_session_runs_one_thing_at_a_time(fake_service) -> None:
    async def main() -> None:
        async with fake_service() as (client, orchestrator):
            sandbox = await client.create()
            session = await sandbox.open_session("sh")
            first = asyncio.create_task(session.run("sleep 0.2"))
            await until(lambda: any(s.busy for s in orchestrator.entry(sandbox.sandbox_id).sessions.values()))
            with pytest.raises(BusyError, match="running something else"):
                await session.run("echo 1")
            (child,) = await sandbox.fork()
            assert await child.sessions() == []  # type: ignore[attr-defined]
            assert (await first).exit_code == 0
            assert (await session.run("echo 1")).text == "1\n"

    asyncio.run(main())


def test_sessions_of_paused_sandboxes_are_found_again_by_the_next_service(fake_service, machine) -> None:
    async def main() -> None:
        async with fake_service() as (client, _):
            running, paused = await client.create(), await client.create()
            for n, sandbox in enumerate((running, paused)):
                for kind in ("python", "sh"):
                    session = await sandbox.open_session(kind)
                    await session.run(f"x={n}")
            await paused.pause()
        box = machine.boxes[paused.sandbox_id]
        del box.processes["p2"]  # the shell ends while nobody looks
        async with fake_service() as (client, _):
            for n, old in enumerate((running, paused)):
                sandbox = await client.connect(old.sandbox_id)
                if n:
                    await sandbox.resume()
                kinds = {s.kind: s for s in await sandbox.sessions()}
                assert set(kinds) == ({"python"} if n else {"python", "sh"})
                assert (await kinds["python"].run("print(x)")).text == f"{n}\n"

    asyncio.run(main())


def test_a_stop_in_the_middle_of_creates_is_recovered(fake_service, machine) -> None:
    async def main() -> None:
        machine.delay_s = 0.05
        async with fake_service(heavy_slots=1) as (client, orchestrator):
            batch = asyncio.create_task(client.create_many(30))
            await until(lambda: len(machine.boxes) == 2)
            orchestrator.stopping = True
            made = await batch
            good = [m for m in made if isinstance(m, LocalSandbox)]
            assert 2 <= len(good) < 6
            assert all("stopping" in str(m) for m in made if not isinstance(m, LocalSandbox))
            with pytest.raises(BusyError, match="stopping"):
                await client.create()
        async with fake_service() as (client, _):
            assert {i.sandbox_id for i in await client.list()} == {g.sandbox_id for g in good}
            assert set(machine.boxes) == {g.sandbox_id for g in good}

    asyncio.run(main())


def test_leases_are_joined_by_clients_and_forgotten_with_release(fake_service) -> None:
    async def main() -> None:
        async with fake_service() as (client, _):
            await asyncio.gather(*(client.create(lease="run") for _ in range(3)))
            assert (await client.join_lease("run"))["how"] == "renewed"
            assert (await client.join_lease("run", own=False, ttl_s=60))["how"] == "shared"
            assert await client.release_lease("run") == 3
            with pytest.raises(NotFoundError):
                await client.heartbeat("run")
            sandbox = await client.create(lease="run")
            await client.heartbeat("run")
            await sandbox.kill()
            with pytest.raises(SandboxDiedError):
                await sandbox.set_timeout(5)

    asyncio.run(main())


def test_using_a_sandbox_writes_no_row(fake_service) -> None:
    async def main() -> None:
        async with fake_service() as (client, orchestrator):
            sandbox = await client.create()
            session = await sandbox.open_session("python")
            statements: list[str] = []
            orchestrator.store._db.set_trace_callback(statements.append)
            for _ in range(3):
                await session.run("x = 1")
                await sandbox.exec(["true"])
                await sandbox.write_file("/f", b"1")
                await sandbox.read_file("/f")
            assert statements == []
            await session.close()
            assert any("DELETE FROM sessions" in s for s in statements)
            orchestrator.store._db.set_trace_callback(None)

    asyncio.run(main())
