"""The host's end of a guest's two pipes: frames out and in, calls waiting for their results, credit,
acknowledgement.

Knows the protocol but no runtime. One event loop, no threads: descriptors are non-blocking and watched by the
loop. End of file or a broken pipe means the guest is gone; every call in flight then ends with
SandboxDiedError. What the guest says is bounded by credit, so an answer is never larger than was asked for.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.core.errors import (
    BusyError,
    DeadlineError,
    InputError,
    NotFoundError,
    SandboxDiedError,
    SandboxError,
    TidemillError,
)
from tidemill.sandbox.guest.protocol import (
    CREDIT_STEP,
    FLAG_END,
    FLAG_MORE,
    INITIAL_CREDIT,
    MAX_PAYLOAD,
    MAX_REQUEST,
    PADDING,
    PROTOCOL_VERSION,
    Decoder,
    Frame,
    Refusal,
    Tag,
    Type,
    decode_fields,
    encode_fields,
    encode_frame,
    numbers,
)

_READ_BYTES = 256 * 1024
_ACK_BYTES = 256 * 1024
"""Received bytes after which we acknowledge without having anything to say."""


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """A live session as the guest lists it."""

    session: int
    kind: str
    busy: bool


@dataclass(frozen=True, slots=True)
class Welcome:
    """The guest's answer to HELLO. `boot_id` changes when it starts to be another sandbox (start, restore,
    fork)."""

    boot_id: str
    generation: int
    sessions: tuple[SessionEntry, ...]


class Call:
    """One request: what came back so far and the future of its end."""

    def __init__(self, channel: Channel, stream: int) -> None:
        self._channel = channel
        self.stream = stream
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.end: asyncio.Future[bytes] = channel.loop.create_future()
        self._owed = 0
        self._credit = INITIAL_CREDIT
        self._more = asyncio.Event()

    def take(self, frame: Frame) -> None:
        """A frame of this stream."""
        if frame.type in (Type.STDOUT, Type.CONTENT):
            self.stdout += frame.payload
        elif frame.type == Type.STDERR:
            self.stderr += frame.payload
        elif frame.type == Type.GRANT:
            self._credit += numbers(frame.payload).get(Tag.SIZE, 0)
            self._more.set()
            return
        else:
            self._finish(frame)
            return
        self._owed += len(frame.payload)
        if self._owed >= CREDIT_STEP:
            self._channel.send(Type.CREDIT, self.stream, encode_fields([(Tag.SIZE, self._owed)]))
            self._owed = 0

    def _finish(self, frame: Frame) -> None:
        self._more.set()
        if self.end.done():
            return
        if frame.type == Type.ERROR:
            self.end.set_exception(_refusal(frame.payload))
        else:
            self.end.set_result(frame.payload)

    def fail(self, error: TidemillError) -> None:
        """End it with an error."""
        if not self.end.done():
            self.end.set_exception(error)
        self._more.set()

    async def send_data(self, data: bytes | memoryview) -> None:
        """Send all of `data` and the end mark as credit allows; returns early if the call ends first."""
        view = memoryview(data)
        at = 0
        while not self.end.done():
            part = view[at : at + min(MAX_PAYLOAD, self._credit)]
            last = at + len(part) == len(view)
            if part or last:
                at += len(part)
                self._credit -= len(part)
                self._channel.send(Type.DATA, self.stream, part, flags=FLAG_END if last else 0)
                if last:
                    return
            else:
                self._more.clear()
                await self._more.wait()


def _refusal(payload: bytes) -> TidemillError:
    message = payload[1:].decode("utf-8", "replace")
    match payload[0] if payload else 0:
        case Refusal.INPUT:
            return InputError(message)
        case Refusal.NOT_FOUND | Refusal.GONE:
            return NotFoundError(message)
        case Refusal.BUSY:
            return BusyError(message)
        case _:
            return SandboxError(message)


class Channel:
    """Owns both descriptors. `identity` (16 bytes) tells the guest which sandbox it is now."""

    def __init__(self, write_fd: int, read_fd: int, *, label: str, identity: bytes) -> None:
        self.loop = asyncio.get_running_loop()
        self.label = label
        self.identity = identity
        self.closed = False
        self.frozen_s = 0.0
        """Seconds the guest has spent frozen; deadlines do not count them."""
        self._write_fd, self._read_fd = write_fd, read_fd
        self._decoder = Decoder()
        self._calls: dict[int, Call] = {}
        self._next_stream = int.from_bytes(os.urandom(3), "little") << 7
        self._seq = 0
        self._seen = 0
        self._unacknowledged = 0
        self._pending: deque[memoryview] = deque()
        self._writing = False
        self.loop.add_reader(read_fd, self._readable)

    # ---- sending

    def send(self, kind: int, stream: int, payload: bytes | memoryview = b"", *, flags: int = 0) -> None:
        """Queue one frame. Raises SandboxDiedError if the channel is closed."""
        if self.closed:
            raise SandboxDiedError(f"{self.label} is gone.")
        self._seq += 1
        self._unacknowledged = 0
        self._pending.append(
            memoryview(encode_frame(kind, stream, payload, seq=self._seq, ack=self._seen, flags=flags))
        )
        if not self._writing:
            self._writable()

    def _writable(self) -> None:
        while self._pending:
            head = self._pending[0]
            try:
                written = os.write(self._write_fd, head)
            except BlockingIOError:
                if not self._writing:
                    self._writing = True
                    self.loop.add_writer(self._write_fd, self._writable)
                return
            except OSError as e:
                self._die(f"writing to it: {e.strerror}")
                return
            if written < len(head):
                self._pending[0] = head[written:]
            else:
                self._pending.popleft()
        if self._writing:
            self._writing = False
            self.loop.remove_writer(self._write_fd)

    def open_call(self) -> Call:
        """A new stream without a request yet."""
        if self.closed:
            raise SandboxDiedError(f"{self.label} is gone.")
        self._next_stream = (self._next_stream + 1) & 0x7FFFFFFF or 1
        call = Call(self, self._next_stream)
        self._calls[call.stream] = call
        return call

    def request(self, kind: int, fields: Sequence[tuple[int, int | bytes | str]]) -> Call:
        """Send a request. Raises InputError if it is too large, SandboxDiedError."""
        body = encode_fields(fields)
        if len(body) > MAX_REQUEST:
            raise InputError(
                f"the request has {len(body)} bytes, more than {MAX_REQUEST}.",
                remedy="Put large data into a file or on stdin.",
            )
        call = self.open_call()
        view = memoryview(body)
        for at in range(0, max(len(body), 1), MAX_PAYLOAD):
            more = at + MAX_PAYLOAD < len(body)
            self.send(kind, call.stream, view[at : at + MAX_PAYLOAD], flags=FLAG_MORE if more else 0)
        return call

    async def finish(self, call: Call, *, timeout_s: float, what: str) -> bytes:
        """Wait for the call's end; time frozen does not count. A passed deadline or a cancellation cancels it
        in the guest.

        Raises what the guest answered, DeadlineError, SandboxDiedError.
        """
        started, frozen = self.loop.time(), self.frozen_s
        try:
            while not call.end.done():
                left = started + timeout_s + (self.frozen_s - frozen) - self.loop.time()
                if left <= 0:
                    raise DeadlineError(f"{self.label}: {what} got no answer within {timeout_s:g} s.")
                await asyncio.wait([call.end], timeout=left)
            return call.end.result()
        finally:
            self._calls.pop(call.stream, None)
            if not call.end.done():
                call.end.cancel()
                if not self.closed:
                    self.send(Type.CANCEL, call.stream)

    async def hello(
        self, *, generation: int = 0, abandon: bool = False, takeover: bool = False, timeout_s: float = 30.0
    ) -> Welcome:
        """Greet the guest.

        abandon   end what a host before us left running (sessions stay, their running cells go on unheard)
        takeover  another host may have died in the middle of a frame
        """
        if takeover:
            self._pending.append(memoryview(PADDING))
        call = self.open_call()
        self._seq = 0
        self.send(
            Type.HELLO,
            call.stream,
            encode_fields(
                [
                    (Tag.IDENTITY, self.identity),
                    (Tag.LAST_SEEN, self._seen),
                    (Tag.GENERATION, generation),
                    (Tag.ABANDON, int(abandon)),
                ]
            ),
        )
        answer = await self.finish(call, timeout_s=timeout_s, what="hello")
        return _welcome(answer, self.label)

    async def list_sessions(self, *, timeout_s: float = 10.0) -> tuple[SessionEntry, ...]:
        """Sessions alive in the guest."""
        answer = await self.finish(self.request(Type.STAT, ()), timeout_s=timeout_s, what="stat")
        return _welcome(answer, self.label).sessions

    async def quiesce(self, *, timeout_s: float = 10.0) -> None:
        """The guest stops speaking at a frame boundary, until `proceed` or another host's hello."""
        call = self.open_call()
        self.send(Type.QUIESCE, call.stream)
        await self.finish(call, timeout_s=timeout_s, what="quiesce")

    def proceed(self) -> None:
        """Undo quiesce."""
        self.send(Type.CONTINUE, 0)

    def shift_deadlines(self, seconds: float) -> None:
        """Tell the guest that it was frozen so long; sent before it runs again, it is read before deadlines
        are looked at."""
        self.frozen_s += seconds
        self.send(Type.SHIFT, 0, encode_fields([(Tag.TIMEOUT_MS, int(seconds * 1000))]))

    # ---- receiving

    def _readable(self) -> None:
        for _ in range(4):
            try:
                data = os.read(self._read_fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno == errno.EINTR:
                    continue
                self._die(f"reading from it: {e.strerror}")
                return
            if not data:
                self._die("its pipes are closed")
                return
            for frame in self._decoder.feed(data):
                self._take(frame)
            self._unacknowledged += len(data)
            if self._unacknowledged >= _ACK_BYTES and not self.closed:
                self.send(Type.ACK, 0)
            if len(data) < _READ_BYTES:
                return

    def _take(self, frame: Frame) -> None:
        if frame.seq <= self._seen:
            return
        self._seen = frame.seq
        call = self._calls.get(frame.stream)
        if call is not None and not self.closed:
            call.take(frame)

    def _die(self, why: str) -> None:
        error = SandboxDiedError(f"{self.label} has ended ({why}).")
        calls = list(self._calls.values())
        self.close()
        for call in calls:
            call.fail(error)

    def close(self) -> None:
        """Let go of the pipes; the guest is not told. Calls in flight end with SandboxDiedError. Idempotent.
        """
        if self.closed:
            return
        self.closed = True
        self.loop.remove_reader(self._read_fd)
        self.loop.remove_writer(self._write_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._pending.clear()
        for call in list(self._calls.values()):
            call.fail(SandboxDiedError(f"{self.label} was let go of."))


def _welcome(payload: bytes, label: str) -> Welcome:
    version, boot_id, generation = 0, "", 0
    sessions: list[SessionEntry] = []
    try:
        for tag, raw in decode_fields(payload):
            if tag == Tag.VERSION:
                version = int.from_bytes(raw, "little")
            elif tag == Tag.BOOT_ID:
                boot_id = raw.decode("ascii", "replace")
            elif tag == Tag.GENERATION:
                generation = int.from_bytes(raw, "little")
            elif tag == Tag.SESSIONS:
                fields = dict(decode_fields(raw))
                sessions.append(
                    SessionEntry(
                        int.from_bytes(fields[Tag.SESSION], "little"),
                        fields[Tag.KIND].decode("ascii", "replace"),
                        bool(int.from_bytes(fields[Tag.BUSY], "little")),
                    )
                )
    except (ValueError, KeyError) as e:
        raise SandboxError(f"{label}: the guest's answer is malformed: {e}") from e
    if version != PROTOCOL_VERSION:
        raise SandboxError(
            f"{label} speaks protocol {version}, this service speaks {PROTOCOL_VERSION}.",
            remedy="Kill it: it was started by another version of tidemill.",
        )
    return Welcome(boot_id, generation, tuple(sessions))
