"""Nothing a host can send ends the agent: random bytes, random frames, random fields in valid frames.

The agent under test is built with the address and undefined-behaviour sanitizers and runs as nobody, since a
random request may by chance be one that does something.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess, RawHost
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.sandbox.guest.binary import agent_sources
from tidemill.sandbox.guest.protocol import MAX_PAYLOAD, PADDING, Tag, Type, encode_fields, encode_frame

NOBODY = 65534
streams = st.integers(0, 4) | st.integers(0, 2**32 - 1)
values = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 1, 2, 1000, 2**63]),
    st.sampled_from([b"python", b"sh", b"/bin/echo", b"/tmp/x", b"/", b"A=b", b"sleep 1"]),
)
fields = st.lists(st.tuples(st.sampled_from(list(Tag)), values), max_size=8).map(encode_fields)
kinds = st.sampled_from([t.value for t in Type if t != Type.HELLO]) | st.integers(0, 255)
payloads = fields | st.binary(max_size=200) | st.sampled_from([bytes(MAX_PAYLOAD), b"\xff" * MAX_PAYLOAD])
items = st.one_of(
    st.tuples(st.just("frame"), kinds, streams, payloads, st.integers(0, 3)),
    st.tuples(st.just("hello"), st.just(0), streams, fields, st.integers(0, 3)),
    st.tuples(st.just("bytes"), st.just(0), st.just(0), st.binary(max_size=100), st.just(0)),
)


@pytest.fixture(scope="module")
def sanitized() -> Iterator[AgentProcess]:
    """One agent for all examples, so that they also meet what earlier ones left."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to run the agent as nobody")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt-get install gcc libc6-dev")
    with tempfile.TemporaryDirectory(prefix="tm-fuzz-") as folder:
        Path(folder).chmod(0o755)
        program = Path(folder) / "agent"
        sources = [str(p) for p in agent_sources() if p.suffix == ".c"]
        done = subprocess.run(
            [
                compiler,
                "-std=gnu11",
                "-O1",
                "-g",
                "-fsanitize=address,undefined",
                "-fno-sanitize-recover=all",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-o",
                str(program),
                *sources,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if "cannot find" in done.stderr:
            pytest.skip("this compiler has no sanitizer libraries")
        assert done.returncode == 0, done.stderr
        with AgentProcess(program=program, user=NOBODY) as agent:
            yield agent


@settings(max_examples=60)
@given(st.lists(items, max_size=12), st.integers(1, 1 << 20))
def test_nothing_a_host_sends_ends_the_agent(
    sanitized: AgentProcess, sent: list[tuple[str, int, int, bytes, int]], step: int
) -> None:
    # Every example is a new host that takes over from the one before.
    with RawHost(sanitized, identity=os.urandom(16)) as host:
        while host.frames(0):
            pass
        host.hello(takeover=True)
        seq = 1
        for what, kind, stream, payload, flags in sent:
            if what == "bytes":
                host.write(payload)
                continue
            seq += 1
            payload = payload[:MAX_PAYLOAD]
            host.write(
                encode_frame(
                    Type.HELLO if what == "hello" else kind, stream, payload, seq=seq, ack=step % (seq * 7), flags=flags
                )
            )
        host.write(PADDING)
    with RawHost(sanitized, identity=os.urandom(16)) as after:
        while after.frames(0):
            pass
        after.hello(last_seen=1 << 62, takeover=True)
        after.exec(77, ["echo", "alive"])
        assert after.result(77)[0] == b"alive\n"


def test_the_agent_builds_without_a_warning(tmp_path: Path) -> None:
    from tidemill.sandbox.guest.binary import build_agent

    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler: apt-get install gcc libc6-dev")
    build_agent(tmp_path / "agent", extra_flags=("-Werror", "-Wshadow", "-Wconversion"))
    assert (tmp_path / "agent").stat().st_size > 100_000
