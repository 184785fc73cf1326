"""One contract over the embedded and the spawned engine: results, errors, cancellation, adapters, the end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tidemill.core.engine_api import (
    Completion,
    EngineClient,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenEvent,
)
from tidemill.core.errors import (
    BusyError,
    CapacityError,
    ConfigError,
    EngineError,
    InputError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    StaleVersionError,
    TidemillError,
)
from tidemill.core.launcher import LocalLauncher, start_time
from tidemill.engine import EmbeddedEngine, EngineConfig, EngineCore, EngineSpec, SpawnedEngine, load_core, wire
from tidemill.engine import messages as m

SIZES = EngineConfig(max_model_len=512, max_running=8, max_batched_tokens=64, prefill_chunk=32, pool_bytes=1 << 26)


@pytest.fixture(scope="module", params=["embedded", "spawned"])
def engine(request, bases):
    spec = EngineSpec(model=bases["tiny"], config=SIZES)
    launcher = LocalLauncher()
    client = EmbeddedEngine(lambda: load_core(spec)) if request.param == "embedded" else SpawnedEngine(spec, launcher)
    yield client
    client.shutdown()
    launcher.stop_all()


def generate_request(name: str, ids=(1, 2, 3), session=None, **sampling):
    return GenerateRequest(request_id=name, ids=tuple(ids), session_id=session,
                           sampling=SamplingParams(**({"max_tokens": 6, "seed": 1} | sampling)))


async def running(engine: EngineClient) -> None:
    """Return once a request runs."""
    for _ in range(2000):
        if (await engine.info()).stats["running"]:
            return
    raise AssertionError("nothing runs")


def test_concurrent_calls_and_streams_agree(engine: EngineClient) -> None:
    async def main() -> None:
        done = await asyncio.gather(*(
            engine.generate(generate_request(f"r{i}", ids=[i + 1] * (5 + i), sequence=i)) for i in range(12)))
        for i, whole in enumerate(done):
            events: list[TokenEvent | Completion] = [
                e async for e in engine.stream(generate_request(f"s{i}", ids=[i + 1] * (5 + i), sequence=i))]
            last = events.pop()
            assert isinstance(last, Completion)
            assert [e.token_id for e in events if isinstance(e, TokenEvent)] == list(whole.ids)
            assert (last.ids, last.logprobs) == (whole.ids, whole.logprobs)

    asyncio.run(main())
    asyncio.run(main())  # another loop, the same engine


def test_scores_sessions_and_info(engine: EngineClient) -> None:
    async def main() -> None:
        await engine.open_session("s")
        one = await engine.generate(generate_request("a", session="s"))
        two = await engine.generate(generate_request("b", ids=[4], session="s"))
        assert two.prompt_tokens == 10
        scores = await engine.score([1, 2, 3, *one.ids])
        assert scores[2:] == one.model_logprobs
        await engine.close_session("s")
        info = await engine.info()
        assert (info.model, info.version, info.vocab_size, info.max_running) == ("tiny", 0, 96, 8)
        assert info.stats["sessions"] == 0

    asyncio.run(main())


def test_errors_arrive_as_themselves(engine: EngineClient) -> None:
    async def main() -> None:
        with pytest.raises(InputError, match="ids holds 96") as bad:
            await engine.generate(generate_request("x", ids=[96]))
        assert bad.value.field == "ids"
        with pytest.raises(NotFoundError, match="no session 'nope'"):
            await engine.generate(generate_request("x", session="nope"))
        with pytest.raises(InputError, match="max_model_len = 512") as long:
            await engine.score([1] * 600)
        assert long.value.remedy.startswith("Shorten")
        with pytest.raises(BusyError) as busy:
            await engine.commit_adapter(3)
        assert busy.value.retryable
        with pytest.raises(InputError):
            _ = [e async for e in engine.stream(generate_request("y", ids=[96]))]

    asyncio.run(main())


def test_cancelling_the_caller_aborts_the_request(engine: EngineClient) -> None:
    async def gone() -> None:
        for _ in range(200):
            stats = (await engine.info()).stats
            if not stats["running"] and not stats["waiting"]:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the request still runs")

    async def main() -> None:
        task = asyncio.create_task(engine.generate(generate_request("long", max_tokens=500)))
        await running(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone()
        stream = engine.stream(generate_request("long", max_tokens=500))
        assert isinstance(stream, AsyncIterator)
        assert isinstance(await anext(stream), TokenEvent)
        await stream.aclose()  # type: ignore[attr-defined]
        await gone()

    asyncio.run(main())


def test_abort_ends_the_request_for_its_caller(engine: EngineClient) -> None:
    async def main() -> None:
        task = asyncio.create_task(engine.generate(generate_request("victim", max_tokens=500)))
        await running(engine)
        await engine.abort("victim")
        assert (await task).finish_reason is FinishReason.ABORT
        await engine.abort("victim")

    asyncio.run(main())


def test_adapter_sync_sleep_and_wake(engine: EngineClient, bases, adapter, driver) -> None:
    local = driver("tiny")
    made = adapter(local, seed=5)

    async def main() -> None:
        version = (await engine.info()).version + 1
        manifest = made.manifest(local.store.digest, version)
        config = made.lora.to_adapter_config()
        with pytest.raises(StaleVersionError):
            await engine.begin_adapter(made.manifest(local.store.digest, version - 1), config, num_chunks=1)
        with pytest.raises(ManifestError, match="num_chunks = 0"):
            await engine.begin_adapter(manifest, config, num_chunks=0)
        chunks = made.chunks()
        await engine.begin_adapter(manifest, config, num_chunks=len(chunks))
        with pytest.raises(IntegrityError, match="bytes of"):
            await engine.adapter_chunk(0, chunks[0], made.data(chunks[0])[::-1])
        await engine.begin_adapter(manifest, config, num_chunks=len(chunks))
        await engine.abort_adapter()
        await engine.begin_adapter(manifest, config, num_chunks=len(chunks))
        for index, names in enumerate(chunks):
            await engine.adapter_chunk(index, names, made.data(names))
        assert await engine.commit_adapter(version) == manifest.manifest_sha256
        info = await engine.info()
        assert (info.version, info.adapter_digest) == (version, manifest.manifest_sha256)
        before = await engine.generate(generate_request("v"))
        assert set(before.versions) == {version}
        report = await engine.sleep()
        assert report.tags == ("pools", "derived")
        with pytest.raises(BusyError):
            await engine.generate(generate_request("v"))
        await engine.wake()
        assert await engine.generate(generate_request("v")) == before

    asyncio.run(main())


def test_start_errors_are_raised_by_the_constructor(bases, tmp_path: Path) -> None:
    launcher = LocalLauncher()
    small = EngineSpec(model=bases["tiny"], config=EngineConfig(pool_bytes=100))
    for make in (lambda s: EmbeddedEngine(lambda: load_core(s)), lambda s: SpawnedEngine(s, launcher)):
        with pytest.raises(CapacityError, match="the pools do not fit"):
            make(small)
        with pytest.raises(ConfigError, match=r"cannot read .*config.json"):
            make(EngineSpec(model=tmp_path / "none"))
    launcher.stop_all()


def test_a_killed_engine_fails_its_callers_and_says_so(bases) -> None:
    launcher = LocalLauncher()
    client = SpawnedEngine(EngineSpec(model=bases["tiny"], config=SIZES), launcher)

    async def main() -> None:
        task = asyncio.create_task(client.generate(generate_request("r", max_tokens=500)))
        await running(client)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="engine process"):
            await task
        with pytest.raises(EngineError):
            await client.info()
        await client.close()
        await client.close()

    asyncio.run(main())
    launcher.stop_all()


def test_the_engine_ends_when_its_socket_closes(bases) -> None:
    launcher = LocalLauncher()
    client = SpawnedEngine(EngineSpec(model=bases["tiny"], config=SIZES), launcher)
    pid = client.pid
    assert client._frames is not None
    client._frames.close()
    deadline = time.monotonic() + 20
    while start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert start_time(pid) is None
    client.shutdown()


def test_closing_an_embedded_engine_fails_open_calls(bases) -> None:
    client = EmbeddedEngine(lambda: load_core(EngineSpec(model=bases["tiny"], config=SIZES)))

    async def main() -> None:
        task = asyncio.create_task(client.generate(generate_request("r", max_tokens=500)))
        await asyncio.sleep(0.02)
        await client.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        await client.close()

    asyncio.run(main())
    assert not any(t.name == "tidemill-engine" and t is client._thread for t in threading.enumerate())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_engine_fails_every_caller_and_is_not_hidden(bases, monkeypatch) -> None:
    client = EmbeddedEngine(lambda: load_core(EngineSpec(model=bases["tiny"], config=SIZES)))

    def broken(self: EngineCore) -> list[m.Reply]:
        raise RuntimeError("out of registers")

    async def main() -> None:
        monkeypatch.setattr(EngineCore, "step", broken)
        with pytest.raises(EngineError, match="unexpected error"):
            await client.generate(generate_request("r"))
        with pytest.raises(EngineError, match="unexpected error"):
            await client.info()

    asyncio.run(main())
    client.shutdown()


def test_frames_survive_splitting_and_bad_ones_are_refused() -> None:
    left, right = socket.socketpair()
    message = m.AdapterChunk(7, 3, ("a", "b"), os.urandom(200_000))
    sender = threading.Thread(target=lambda: (wire.send_frame(left, *wire.encode_message(message)), left.close()))
    sender.start()
    with right, right.makefile("rb") as file:
        received = wire.read_frame(file.read)
        assert received is not None
        assert wire.decode_message(*received) == message
        assert wire.read_frame(file.read) is None
    sender.join()
    for broken in (b"\x01", b"\xff\xff\xff\xff\x00\x00\x00\x00", wire.frame(b"abc", b"")[:-1]):
        chunks = iter([broken[:8], broken[8:]])
        with pytest.raises(EngineError):
            wire.read_frame(lambda n, c=chunks: next(c)[:n])
    for header in (b"junk", b'{"kind":"Nope","body":{}}', b'{"kind":"Info","body":{"call_id":"x"}}'):
        with pytest.raises(EngineError):
            wire.decode_message(header, b"")


@pytest.mark.parametrize("error", [
    InputError("a", field="f", remedy="r"), NotFoundError("é \"quoted\""), StaleVersionError("s"), BusyError("b"),
    CapacityError("c", field="pool_bytes"),
])
def test_every_error_keeps_its_class_and_fields_on_the_wire(error: TidemillError) -> None:
    header, _ = wire.encode_reply(m.Failure(5, error))
    reply = wire.decode_reply(header)
    assert isinstance(reply, m.Failure)
    assert type(reply.error) is type(error)
    assert str(reply.error) == str(error)
    assert vars(reply.error) == vars(error)


def test_replies_keep_every_bit_of_a_float() -> None:
    values = (-1.0000000000000002, -3.3333333e-38, 0.1 + 0.2)
    reply = wire.decode_reply(wire.encode_reply(m.Result(1, values))[0])
    assert reply == m.Result(1, values)
