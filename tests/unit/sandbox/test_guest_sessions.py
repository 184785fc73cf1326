"""Live shells and interpreters through the real agent and zygote."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from agent_process import AgentProcess, RawHost, gone, with_guest

from tidemill.core.errors import BusyError, InputError, NotFoundError
from tidemill.core.sandbox_api import ExecResult
from tidemill.sandbox.backends.guest import AgentGuest
from tidemill.sandbox.guest.protocol import Tag, Type, numbers

Run = Callable[..., Awaitable[ExecResult]]


def with_session(kind: str, body: Callable[[Run, AgentGuest], Awaitable[None]]) -> None:
    async def main(guest: AgentGuest) -> None:
        session = await guest.open_session(kind)

        async def run(code: str, *, timeout_s: float = 30.0, limit: int = 1 << 20) -> ExecResult:
            return await session.run(code, timeout_s=timeout_s, max_output_bytes=limit)

        await body(run, guest)
        await session.close()
        await session.close()

    with_guest(main, zygote=True)


def test_a_shell_keeps_its_state() -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        assert (await run('x=1; f() { echo "f:$x:$1"; }; cd /usr; export Y=2')).exit_code == 0
        assert (await run("x=5")).exit_code == 0
        done = await run("f a; pwd; sh -c 'echo $Y'; echo err >&2; (exit 9)")
        assert (done.stdout, done.stderr, done.exit_code) == (b"f:5:a\n/usr\n2\n", b"err\n", 9)

    with_session("sh", body)


@pytest.mark.parametrize(
    ("code", "out"),
    [
        ("echo 'a'\"b\"", b"ab\n"),
        ("cat <<'E'\nit's $x\nE", b"it's $x\n"),
        ("# only a comment", b""),
        ("", b""),
        ("echo a; # '", b"a\n"),
        ("for i in 1 2\ndo echo $i\ndone", b"1\n2\n"),
        ("echo \\", b"\\\n"),
        ("printf 'no newline'", b"no newline"),
        ("cat", b""),
        ('read x; echo "<$x>"', b"<>\n"),
        ("echo ünï", "ünï\n".encode()),
        ("printf '\\377\\0'", b"\xff\0"),
    ],
)
def test_whatever_the_code_is_made_of_it_stays_one_cell(code: str, out: bytes) -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        assert (await run(code)).stdout == out
        assert (await run("echo next")).stdout == b"next\n"

    with_session("sh", body)


@pytest.mark.parametrize("code", ["echo 'unclosed", "if true", "fi", "echo $(", "cat <<E", ")", "}; printf '0\\n' >&9"])
def test_bad_syntax_is_an_exit_code_and_the_shell_lives(code: str) -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        await run("x=7")
        done = await run(code)
        assert done.exit_code is not None
        assert (await run("echo $x")).stdout == b"7\n"

    with_session("sh", body)


def test_a_shell_that_lies_about_its_status_harms_only_itself() -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        lie = "for fd in /proc/self/fd/*; do n=${fd##*/}; [ $n -gt 2 ] && printf '\\3779999999999' >&$n; done; (exit 4)"
        assert (await run(lie)).exit_code is not None
        other = await guest.open_session("sh")
        assert (await other.run("echo ok; false", timeout_s=9, max_output_bytes=9)).exit_code == 1

    with_session("sh", body)


def test_a_shell_that_exits_gives_its_code_and_is_gone() -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        done = await run("echo bye; exit 6")
        assert (done.stdout, done.exit_code) == (b"bye\n", 6)
        with pytest.raises(NotFoundError):
            await run("echo")

    with_session("sh", body)


@pytest.mark.parametrize("kind", ["sh", "python"])
def test_a_passed_deadline_ends_the_session_and_its_children(kind: str) -> None:
    code = {
        "sh": "sleep 1000 & echo $! $$; wait",
        "python": "import subprocess, os\np = subprocess.Popen(['sleep', '1000'])\nprint(p.pid, os.getpid())\np.wait()",
    }

    async def body(run: Run, guest: AgentGuest) -> None:
        done = await run(code[kind], timeout_s=0.7)
        assert (done.timed_out, done.exit_code) == (True, None)
        pids = [int(word) for word in done.stdout.split()]
        assert len(pids) == 2
        for pid in pids:
            assert await asyncio.to_thread(gone, pid)
        with pytest.raises(NotFoundError):
            await run("1")
        other = await guest.open_session(kind)
        assert (
            await other.run("1+1" if kind == "python" else "echo 2", timeout_s=9, max_output_bytes=9)
        ).stdout == b"2\n"

    with_session(kind, body)


@pytest.mark.parametrize(("kind", "code"), [("sh", "yes"), ("python", "while True: print('y')")])
def test_endless_output_is_cut_and_the_deadline_still_holds(kind: str, code: str) -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        done = await run(code, timeout_s=0.5, limit=100)
        assert (done.stdout, done.truncated, done.timed_out) == (b"y\n" * 50, True, True)

    with_session(kind, body)


@pytest.mark.parametrize(
    ("kind", "code"), [("sh", "head -c 3000000 /dev/zero"), ("python", "print('\\0' * 3_000_000, end='')")]
)
def test_large_output_is_whole(kind: str, code: str) -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        done = await run(code, limit=1 << 23)
        assert (len(done.stdout), done.exit_code, done.truncated) == (3_000_000, 0, False)
        cut = await run(code, limit=1000)
        assert (len(cut.stdout), cut.exit_code, cut.truncated) == (1000, 0, True)

    with_session(kind, body)


def test_an_interpreter_keeps_its_state_and_shows_the_last_value() -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        assert (await run("x = [1]\ndef f(a):\n    return a + len(x)\n")).stdout == b""
        assert (await run("x.append('ü'); x")).stdout == "[1, 'ü']\n".encode()
        assert (await run("print('p', end='')\nf(1)")).stdout == b"p3\n"
        assert (await run("None")).stdout == b""
        assert (await run("_")).stdout == b"3\n"
        assert (await run("import sys; print('e', file=sys.stderr)")).stderr == b"e\n"
        assert (await run("")).exit_code == 0
        assert (
            await run("class A:\n  pass\nimport pickle\nlen(pickle.dumps(A())) > 0; __name__")
        ).stdout == b"'__main__'\n"

    with_session("python", body)


def test_an_exception_is_a_traceback_and_exit_code_1() -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        done = await run("def f():\n    return 1 / 0\nprint('before')\nf()")
        assert (done.exit_code, done.stdout) == (1, b"before\n")
        text = done.stderr.decode()
        assert text.startswith("Traceback (most recent call last):\n")
        assert text.endswith("ZeroDivisionError: division by zero\n")
        assert "return 1 / 0" in text
        assert "zygote" not in text
        bad = await run("x = (1,\ny = 2")
        assert (bad.exit_code, b"SyntaxError" in bad.stderr) == (1, True)
        assert (await run("raise KeyboardInterrupt")).exit_code == 1
        assert (await run("'lives'")).stdout == b"'lives'\n"

    with_session("python", body)


@pytest.mark.parametrize(
    ("code", "exit_code", "signal"),
    [
        ("raise SystemExit(5)", 5, 0),
        ("import sys; sys.exit('why')", 1, 0),
        ("import os; os._exit(3)", 3, 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None, 9),
        ("exit()", 0, 0),
    ],
)
def test_an_interpreter_that_ends_says_how(code: str, exit_code: int | None, signal: int) -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        done = await run(code)
        assert (done.exit_code, done.signal) == (exit_code, signal)
        with pytest.raises(NotFoundError):
            await run("1")

    with_session("python", body)


def test_a_cell_that_forks_answers_once() -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        done = await run(
            "import os\npid = os.fork()\nprint('child' if pid == 0 else 'parent')\nif pid: os.waitpid(pid, 0)"
        )
        assert sorted(done.stdout.split()) == [b"child", b"parent"]
        assert (await run("1+1")).stdout == b"2\n"
        assert (await run("2+2")).stdout == b"4\n"

    with_session("python", body)


def test_output_written_below_python_keeps_its_place() -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        done = await run("import os\nprint('one', flush=True)\nos.write(1, b'two\\n')\nos.system('echo three')\nNone")
        assert done.stdout == b"one\ntwo\nthree\n"
        assert (await run("input()")).exit_code == 1
        assert (await run("import sys; sys.stdout.close()")).exit_code is not None

    with_session("python", body)


def test_sessions_are_apart_and_listed() -> None:
    async def body(guest: AgentGuest) -> None:
        a, b, c = [await guest.open_session(kind) for kind in ("python", "python", "sh")]
        await a.run("x = 1", timeout_s=9, max_output_bytes=9)
        assert (await b.run("x", timeout_s=9, max_output_bytes=999)).exit_code == 1
        assert [(e.kind, e.busy) for e in await guest.channel.list_sessions()] == [
            ("sh", False),
            ("python", False),
            ("python", False),
        ]
        again = await guest.attach_session(a.record())
        assert (await again.run("x", timeout_s=9, max_output_bytes=9)).stdout == b"1\n"
        await a.close()
        with pytest.raises(NotFoundError):
            await guest.attach_session(a.record())
        assert len(await guest.channel.list_sessions()) == 2
        await c.close()
        await b.close()

    with_guest(body, zygote=True)


def test_one_cell_at_a_time() -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        first = asyncio.ensure_future(run("sleep 0.5; echo done"))
        await asyncio.sleep(0.1)
        with pytest.raises(BusyError):
            await run("echo no")
        assert (await first).stdout == b"done\n"

    with_session("sh", body)


def test_a_cancelled_cell_ends_its_session() -> None:
    async def body(run: Run, guest: AgentGuest) -> None:
        task = asyncio.ensure_future(run("import time, os; time.sleep(1000)"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(NotFoundError):
            await run("1")
        while await guest.channel.list_sessions():
            await asyncio.sleep(0.01)

    with_session("python", body)


def test_too_many_sessions_and_unknown_kinds_are_refused() -> None:
    async def body(guest: AgentGuest) -> None:
        with pytest.raises(InputError, match="perl"):
            await guest.open_session("perl")
        for _ in range(64):
            await guest.open_session("sh")
        with pytest.raises(BusyError):
            await guest.open_session("sh")

    with_guest(body)


def test_a_copy_draws_other_random_numbers() -> None:
    code = "import random; random.random()"
    with AgentProcess(zygote=True) as agent:
        drawn = []
        with RawHost(agent) as host:
            host.hello()
            host.send(Type.SESSION_OPEN, 20, [(Tag.KIND, "python")])
            session = numbers(host.result(20)[1].payload)[Tag.SESSION]
            host.send(
                Type.SESSION_RUN,
                21,
                [(Tag.SESSION, session), (Tag.CODE, "import random; random.seed(1); s = random.getstate()")],
            )
            host.result(21)
            host.send(Type.SESSION_RUN, 22, [(Tag.SESSION, session), (Tag.CODE, code)])
            drawn.append(host.result(22)[0])
            host.send(Type.SESSION_RUN, 23, [(Tag.SESSION, session), (Tag.CODE, "random.setstate(s)")])
            host.result(23)
        with RawHost(agent, identity=b"x" * 16) as copy:
            copy.hello(generation=1)
            copy.send(Type.SESSION_RUN, 24, [(Tag.SESSION, session), (Tag.CODE, code)])
            drawn.append(copy.result(24)[0])
        assert drawn[0] != drawn[1]
