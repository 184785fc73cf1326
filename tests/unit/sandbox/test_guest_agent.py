"""Commands and files through the real agent, and its protocol: replay, acknowledgement, credit, take-over, freezing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from pathlib import Path

import pytest
from agent_process import AgentProcess, RawHost, gone, process_lives, with_guest

from tidemill.core.errors import InputError, NotFoundError
from tidemill.core.sandbox_api import ExecResult
from tidemill.sandbox.backends.guest import AgentGuest
from tidemill.sandbox.guest.protocol import (
    FLAG_END,
    FLAG_MORE,
    INITIAL_CREDIT,
    MAX_PAYLOAD,
    MAX_REQUEST,
    PADDING,
    Frame,
    Refusal,
    Tag,
    Type,
    encode_fields,
    encode_frame,
    numbers,
)

RETAINED = 1 << 20
"""WIRE_RETAINED of wire.h."""


async def run(
    guest: AgentGuest,
    *argv: str,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    cwd: str = "/",
    timeout_s: float = 30.0,
    limit: int = 1 << 24,
) -> ExecResult:
    return await guest.exec(
        argv, stdin=stdin, env=env or {}, cwd=cwd, user="user", timeout_s=timeout_s, max_output_bytes=limit
    )


def test_a_command_gets_its_arguments_environment_folder_and_input() -> None:
    async def body(guest: AgentGuest) -> None:
        done = await run(
            guest,
            "sh",
            "-c",
            'printf "%s|" "$@" "$COLOUR" "$PWD"; cat; echo oops >&2; exit 7',
            "sh",
            "a b",
            "",
            stdin=b"in\0\xff",
            env={"COLOUR": "blue ü"},
            cwd="/usr",
        )
        assert done.stdout == "a b||blue ü|/usr|".encode() + b"in\0\xff"
        assert (done.stderr, done.exit_code, done.signal, done.timed_out, done.truncated) == (
            b"oops\n",
            7,
            0,
            False,
            False,
        )
        assert (await run(guest, "cat")).stdout == b""
        killed = await run(guest, "sh", "-c", "kill -TERM $$")
        assert (killed.exit_code, killed.signal) == (None, 15)

    with_guest(body)


def test_large_input_and_output_pass_whole() -> None:
    async def body(guest: AgentGuest) -> None:
        data = os.urandom(3_000_001)
        assert (await run(guest, "cat", stdin=data)).stdout == data
        # A command that never reads its input ends all the same.
        assert (await run(guest, "true", stdin=data)).exit_code == 0
        long = "x" * 100_000
        assert (await run(guest, "echo", "-n", long, long)).stdout == f"{long} {long}".encode()

    with_guest(body)


def test_output_may_be_any_bytes() -> None:
    async def body(guest: AgentGuest) -> None:
        done = await run(guest, "printf", r"\377\200\0\303")
        assert done.stdout == b"\xff\x80\0\xc3"
        assert done.text == "\ufffd\ufffd\0\ufffd"

    with_guest(body)


@pytest.mark.parametrize("argv", [["no-such-program"], ["/etc/passwd"], ["/"], [""], []])
def test_what_cannot_start_is_refused(argv: list[str]) -> None:
    async def body(guest: AgentGuest) -> None:
        with pytest.raises(InputError):
            await run(guest, *argv)
        assert (await run(guest, "true")).exit_code == 0

    with_guest(body)


def test_bad_folders_variables_users_and_deadlines_are_refused() -> None:
    async def body(guest: AgentGuest) -> None:
        with pytest.raises(InputError, match="/no/such"):
            await run(guest, "true", cwd="/no/such")
        with pytest.raises(InputError, match="env"):
            await run(guest, "true", env={"A=B": "c"})
        with pytest.raises(InputError, match="zero byte"):
            await run(guest, "echo", "a\0b")
        with pytest.raises(InputError, match="timeout_s"):
            await run(guest, "true", timeout_s=0)
        with pytest.raises(InputError, match="nobody"):
            await guest.exec(["true"], stdin=b"", env={}, cwd="", user="nobody", timeout_s=1, max_output_bytes=1)
        with pytest.raises(InputError, match="bytes"):
            await run(guest, "echo", "x" * (MAX_REQUEST + 1))

    with_guest(body)


def test_output_beyond_the_limit_is_dropped_and_flagged_and_the_command_ends_normally() -> None:
    async def body(guest: AgentGuest) -> None:
        done = await run(guest, "sh", "-c", "head -c 5000000 /dev/zero; echo end >&2; exit 3", limit=1000)
        assert done.exit_code == 3
        assert done.truncated
        assert len(done.stdout) + len(done.stderr) == 1000
        exact = await run(guest, "head", "-c", "1000", "/dev/zero", limit=1000)
        assert (len(exact.stdout), exact.truncated) == (1000, False)

    with_guest(body)


def test_endless_output_does_not_hold_up_others() -> None:
    async def body(guest: AgentGuest) -> None:
        flood = asyncio.ensure_future(run(guest, "yes", limit=1 << 40, timeout_s=60))
        cut = asyncio.ensure_future(run(guest, "yes", limit=10, timeout_s=60))
        for i in range(20):
            assert (await run(guest, "echo", str(i))).stdout == f"{i}\n".encode()
        assert not flood.done()
        assert not cut.done()
        for task in (flood, cut):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await run(guest, "true")).exit_code == 0

    with_guest(body)


def test_a_passed_deadline_ends_the_whole_group() -> None:
    async def body(guest: AgentGuest) -> None:
        done = await run(guest, "sh", "-c", "sleep 1000 & echo $! $$; wait", timeout_s=0.3)
        assert (done.timed_out, done.exit_code, done.signal) == (True, None, 9)
        assert all(gone(int(pid)) for pid in done.stdout.split())

    with_guest(body)


def test_a_cancelled_command_is_ended(tmp_path: Path) -> None:
    async def body(guest: AgentGuest) -> None:
        note = tmp_path / "pid"
        task = asyncio.ensure_future(run(guest, "sh", "-c", f"echo $$ > {note}.new; mv {note}.new {note}; sleep 1000"))
        while not note.exists():
            await asyncio.sleep(0.01)
        pid = int(note.read_text())
        assert process_lives(pid)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gone, pid)

    with_guest(body)


def test_a_command_does_not_wait_for_what_it_leaves_in_the_background() -> None:
    async def body(guest: AgentGuest) -> None:
        done = await run(guest, "sh", "-c", "(sleep 1000; echo late) & echo $!")
        assert done.exit_code == 0
        pid = int(done.stdout)
        assert process_lives(pid)
        await run(guest, "pkill", "-9", "-P", str(pid))
        os.kill(pid, 9)
        assert gone(pid)

    with_guest(body)


def test_files_go_in_and_out(tmp_path: Path) -> None:
    async def body(guest: AgentGuest) -> None:
        data = os.urandom(3_000_001)
        path = tmp_path / "a" / "b" / "ü.bin"
        await guest.write_file(str(path), data, mode=0o640)
        assert path.read_bytes() == data
        assert path.stat().st_mode & 0o7777 == 0o640
        assert await guest.read_file(str(path), max_bytes=len(data)) == data
        await guest.write_file(str(path), b"", mode=0o600)
        assert await guest.read_file(str(path), max_bytes=0) == b""
        assert [p.name for p in path.parent.iterdir()] == ["ü.bin"]

    with_guest(body)


def test_bad_paths_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 1001)

    async def body(guest: AgentGuest) -> None:
        for path in (tmp_path / "none", tmp_path / "large" / "below"):
            with pytest.raises(NotFoundError):
                await guest.read_file(str(path), max_bytes=10)
        for path in (tmp_path, tmp_path / "pipe", tmp_path / "large", Path("/dev/zero")):
            with pytest.raises(InputError):
                await guest.read_file(str(path), max_bytes=1000)
        for text in ("", "a\0b", str(tmp_path), f"{tmp_path}/", f"{tmp_path}/large/below"):
            with pytest.raises(InputError):
                await guest.write_file(text, b"x", mode=0o644)
        with pytest.raises(InputError):
            await guest.read_file("/proc/kmsg" if os.path.exists("/proc/kmsg") else "/dev/zero", max_bytes=10)

    with_guest(body)


def test_a_file_that_grows_while_it_is_read_does_not_pass_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 50_000)
    stop = threading.Event()

    def grow() -> None:
        while not stop.is_set():
            with path.open("ab") as f:
                f.write(b"y" * 10_000)

    async def body(guest: AgentGuest) -> None:
        writer = asyncio.ensure_future(asyncio.to_thread(grow))
        try:
            for _ in range(10):
                with contextlib.suppress(InputError):
                    assert len(await guest.read_file(str(path), max_bytes=1_000_000)) <= 1_000_000
        finally:
            stop.set()
            await writer

    with_guest(body)


def test_a_write_broken_off_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with AgentProcess() as agent, RawHost(agent) as host:
        host.hello()
        host.send(Type.PUT, 20, [(Tag.PATH, str(path)), (Tag.MAX_BYTES, 100)])
        host.send(Type.DATA, 20, payload=b"half")
        host.send(Type.STAT, 21)
        host.result(21)
        assert len(list(tmp_path.iterdir())) == 2
        host.send(Type.CANCEL, 20)
        host.send(Type.STAT, 22)
        host.result(22)
        assert [p.name for p in tmp_path.iterdir()] == ["file"]
        assert path.read_bytes() == b"old"
        # More than was announced.
        host.send(Type.PUT, 30, [(Tag.PATH, str(path)), (Tag.MAX_BYTES, 3)])
        host.send(Type.DATA, 30, payload=b"four", flags=FLAG_END)
        assert host.result(30)[1].payload[0] == Refusal.INPUT
        assert path.read_bytes() == b"old"


# ---- the protocol


def test_what_a_dead_host_did_not_read_is_said_again_to_the_next() -> None:
    with AgentProcess() as agent:
        first = RawHost(agent)
        first.hello()
        first.exec(20, ["sh", "-c", "seq 1 30000"])
        seen: list[Frame] = []
        first.until(lambda f: f.stream == 20 and f.type == Type.STDOUT, seen)
        first.read_bytes(10_000)  # read, and lost with the host; ends inside a frame
        last_seen = max(f.seq for f in seen) if seen else 1
        first.close()
        with RawHost(agent) as second:
            welcome = second.hello(last_seen=last_seen, takeover=True)
            # What the dead one left unread in the pipe comes too, so a frame may come twice, and early.
            whole = {welcome.seq: welcome}
            while not any(f.type == Type.RESULT for f in whole.values()) or sorted(whole) != list(
                range(last_seen + 1, max(whole) + 1)
            ):
                frame = second.until(lambda f: True)
                assert whole.setdefault(frame.seq, frame).payload == frame.payload
            assert b"".join(whole[n].payload for n in sorted(whole) if whole[n].type == Type.STDOUT) == b"".join(
                b"%d\n" % i for i in range(1, 30001)
            )
            (end,) = (f for f in whole.values() if f.type == Type.RESULT)
            assert numbers(end.payload)[Tag.EXIT_CODE] == 0


def test_what_was_acknowledged_is_not_said_again() -> None:
    with AgentProcess() as agent:
        with RawHost(agent) as first:
            first.hello()
            first.exec(20, ["echo", "one"])
            _, end = first.result(20)
            first.ack = end.seq
            first.exec(21, ["echo", "two"])
            _, last = first.result(21)
        with RawHost(agent) as second:
            second.send(Type.HELLO, 7, [(Tag.IDENTITY, second.identity), (Tag.LAST_SEEN, 0)])
            seen: list[Frame] = []
            welcome = second.until(lambda f: f.type == Type.WELCOME, seen)
            assert [f.stream for f in seen if f.type == Type.RESULT] == [21]
            assert min(f.seq for f in seen) > end.seq
            assert welcome.seq > last.seq


def test_a_next_host_may_have_what_ran_ended() -> None:
    with AgentProcess() as agent:
        with RawHost(agent) as first:
            first.hello()
            first.exec(20, ["sh", "-c", "echo $$; sleep 1000"])
            pid = int(first.until(lambda f: f.type == Type.STDOUT).payload)
        with RawHost(agent) as second:
            second.hello(last_seen=1 << 40, abandon=1)
            assert gone(pid)
            second.exec(20, ["echo", "again"])
            assert second.result(20)[0] == b"again\n"


def test_no_more_is_sent_than_there_is_credit_for() -> None:
    with AgentProcess() as agent, RawHost(agent) as host:
        host.hello()
        host.exec(20, ["head", "-c", "600000", "/dev/zero"])
        got = 0

        def flood(frame: Frame) -> bool:
            nonlocal got
            got += len(frame.payload) if frame.stream == 20 and frame.type == Type.STDOUT else 0
            return got >= INITIAL_CREDIT

        host.until(flood)
        host.exec(21, ["echo", "others go on"])
        assert host.result(21)[0] == b"others go on\n"
        assert host.frames(0.3) == []
        assert got == INITIAL_CREDIT
        host.send(Type.CREDIT, 20, [(Tag.SIZE, 1_000_000)])
        rest, end = host.result(20)
        assert got + len(rest) == 600_000
        assert end.type == Type.RESULT


def test_what_is_kept_for_replay_is_bounded() -> None:
    with AgentProcess() as agent, RawHost(agent) as host:
        host.hello()
        host.exec(20, ["head", "-c", "8000000", "/dev/zero"])
        host.send(Type.CREDIT, 20, [(Tag.SIZE, 1 << 40)])
        total, last = 0, 0
        while frames := host.frames(0.5):
            total += sum(len(f.payload) for f in frames)
            last = frames[-1].seq
        assert RETAINED - MAX_PAYLOAD <= total <= RETAINED + 2 * MAX_PAYLOAD
        # Answers are not data: they pass.
        host.send(Type.STAT, 21)
        assert host.result(21)[1].type == Type.RESULT
        host.ack = last
        host.send(Type.ACK, 0)
        while total < 8_000_000:
            frame = host.until(lambda f: f.type == Type.STDOUT)
            total += len(frame.payload)
            host.ack = frame.seq
            host.send(Type.ACK, 0)
        assert host.result(20)[1].type == Type.RESULT


def test_input_is_granted_as_it_is_used() -> None:
    with AgentProcess() as agent, RawHost(agent) as host:
        host.hello()
        host.exec(20, ["sleep", "1000"], (Tag.STDIN, 1))
        for _ in range(0, INITIAL_CREDIT, MAX_PAYLOAD):
            host.send(Type.DATA, 20, payload=bytes(MAX_PAYLOAD))
        host.exec(21, ["true"])
        host.result(21)
        # The pipe takes 64 KiB, so nothing was granted yet; who sends on regardless is refused.
        for _ in range(0, 2 * INITIAL_CREDIT, MAX_PAYLOAD):
            host.send(Type.DATA, 20, payload=bytes(MAX_PAYLOAD))
        assert host.result(20)[1].payload[0] == Refusal.INPUT


def test_half_a_frame_of_a_dead_host_does_not_confuse_the_next() -> None:
    with AgentProcess() as agent:
        with RawHost(agent) as first:
            first.hello()
            whole = encode_frame(Type.EXEC, 20, encode_fields([(Tag.ARGV, "true"), (Tag.STDIN, 1)]), seq=2, ack=0)
            first.write(whole[:-5])
        with RawHost(agent) as second:
            second.hello(takeover=True)
            second.exec(21, ["echo", "fine"])
            assert second.result(21)[0] == b"fine\n"


def test_rubbish_between_frames_is_skipped() -> None:
    with AgentProcess() as agent, RawHost(agent) as host:
        host.hello()
        host.write(b"TDM1" * 100 + os.urandom(5000) + PADDING)
        host.exec(21, ["echo", "fine"])
        assert host.result(21)[0] == b"fine\n"


def test_a_request_may_span_frames() -> None:
    with AgentProcess() as agent, RawHost(agent) as host:
        host.hello()
        body = encode_fields(
            [(Tag.ARGV, "printf"), (Tag.ARGV, "%s"), (Tag.ARGV, "y" * 100_000), (Tag.ENV, "PATH=/usr/bin:/bin")]
        )
        host.send(Type.EXEC, 20, payload=body[:MAX_PAYLOAD], flags=FLAG_MORE)
        host.exec(21, ["true"])
        host.result(21)
        host.send(Type.EXEC, 20, payload=body[MAX_PAYLOAD:])
        assert host.result(20)[0] == b"y" * 100_000


def test_a_quiet_guest_says_nothing_until_it_may() -> None:
    with AgentProcess() as agent, RawHost(agent) as host:
        host.hello()
        host.exec(20, ["sh", "-c", "while :; do echo tick; sleep 0.02; done"], (Tag.TIMEOUT_MS, 60_000))
        host.until(lambda f: f.type == Type.STDOUT)
        host.send(Type.QUIESCE, 30)
        host.until(lambda f: f.type == Type.QUIET)
        assert host.frames(0.4) == []
        host.send(Type.CONTINUE, 0)
        assert host.until(lambda f: f.type == Type.STDOUT).payload.startswith(b"tick")


def test_deadlines_stand_still_while_quiet_and_can_be_moved() -> None:
    with AgentProcess() as agent, RawHost(agent) as host:
        host.hello()
        host.exec(20, ["sleep", "1000"], (Tag.TIMEOUT_MS, 300))
        host.send(Type.QUIESCE, 30)
        host.until(lambda f: f.type == Type.QUIET)
        assert host.frames(0.6) == []
        host.send(Type.SHIFT, 0, [(Tag.TIMEOUT_MS, 1_000_000)])
        host.send(Type.CONTINUE, 0)
        assert host.frames(0.6) == []
        host.send(Type.CANCEL, 20)
        host.exec(21, ["sleep", "1000"], (Tag.TIMEOUT_MS, 300))
        assert numbers(host.result(21)[1].payload)[Tag.TIMED_OUT] == 1


def test_another_identity_makes_it_another_sandbox() -> None:
    with AgentProcess() as agent:
        with RawHost(agent) as source:
            first = source.hello()
            source.exec(20, ["sh", "-c", "echo $$; sleep 0.2; echo late; sleep 1000"])
            pid = int(source.until(lambda f: f.type == Type.STDOUT).payload)
            source.send(Type.QUIESCE, 30)
            source.until(lambda f: f.type == Type.QUIET)
        with RawHost(agent, identity=b"x" * 16) as copy:
            second = copy.hello(generation=5)
            old, new = dict(_fields(first)), dict(_fields(second))
            assert old[Tag.BOOT_ID] != new[Tag.BOOT_ID]
            assert int.from_bytes(new[Tag.GENERATION], "little") == 5
            # Its processes go on; its streams were the source's.
            assert copy.frames(0.5) == []
            assert process_lives(pid)
            copy.exec(20, ["echo", "mine"])
            assert copy.result(20)[0] == b"mine\n"


def test_a_greeting_again_changes_nothing() -> None:
    with AgentProcess() as agent:
        with RawHost(agent) as first:
            one = dict(_fields(first.hello()))
        with RawHost(agent) as second:
            two = dict(_fields(second.hello()))
        assert one[Tag.BOOT_ID] == two[Tag.BOOT_ID]


def test_nothing_is_done_before_a_greeting() -> None:
    with AgentProcess() as agent, RawHost(agent) as host:
        host.exec(20, ["echo", "no"])
        assert host.frames(0.3) == []
        host.hello()
        assert host.frames(0.2) == []


def test_unknown_requests_and_reset_outside_a_sandbox_are_refused() -> None:
    with AgentProcess() as agent, RawHost(agent) as host:
        host.hello()
        host.send(50, 20)
        assert host.result(20)[1].type == Type.ERROR
        host.send(Type.RESET, 21)
        assert host.result(21)[1].payload[0] == Refusal.INPUT


def _fields(frame: Frame) -> list[tuple[int, bytes]]:
    from tidemill.sandbox.guest.protocol import decode_fields

    return list(decode_fields(frame.payload))
