"""Frames and messages between the host and the guest agent: the Python side of wire.h and agent.h.

Pure functions and tables; no descriptors, no event loop. A frame is a 36-byte header and at most 64 KiB; a
message is a row of tagged fields in one or more frames of the same type and stream.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

PROTOCOL_VERSION = 1
MAGIC = b"TDM1"
MAX_PAYLOAD = 65_536
HEADER = struct.Struct("<4sBBHIIQQI")
PADDING = bytes(HEADER.size + MAX_PAYLOAD)
"""Completes any frame that a writer before us left half written."""
INITIAL_CREDIT = 256 * 1024
"""Bytes of data a side may send on a stream before the other grants more."""
CREDIT_STEP = 128 * 1024
MAX_REQUEST = 4 * 1024 * 1024
FLAG_MORE = 1
FLAG_END = 2


class Type(IntEnum):
    """Frame types; those from 64 on come from the guest."""

    HELLO = 1
    EXEC = 2
    DATA = 3
    CREDIT = 4
    CANCEL = 5
    SESSION_OPEN = 6
    SESSION_RUN = 7
    SESSION_CLOSE = 8
    SESSION_LIST = 9
    PUT = 10
    GET = 11
    QUIESCE = 12
    CONTINUE = 13
    RESET = 14
    STAT = 15
    ACK = 16
    SHIFT = 17
    WELCOME = 64
    STDOUT = 65
    STDERR = 66
    RESULT = 67
    ERROR = 68
    GRANT = 69
    QUIET = 70
    CONTENT = 71


class Tag(IntEnum):
    """Fields of messages. Numbers are unsigned 64-bit unless the field is text or bytes."""

    ARGV = 1
    ENV = 2
    CWD = 3
    UID = 4
    TIMEOUT_MS = 5
    OUTPUT_LIMIT = 6
    NPROC = 7
    ADDRESS_SPACE = 8
    NOFILE = 9
    STDIN = 10
    IDENTITY = 11
    LAST_SEEN = 12
    GENERATION = 13
    ABANDON = 14
    SESSION = 15
    KIND = 16
    PATH = 17
    MODE = 18
    CODE = 19
    MAX_BYTES = 20
    EXIT_CODE = 64
    SIGNAL = 65
    TIMED_OUT = 66
    TRUNCATED = 67
    DURATION_US = 68
    BOOT_ID = 69
    PID = 70
    BUSY = 71
    PROCESSES = 72
    NEEDS_FULL = 73
    DETAIL = 74
    VERSION = 75
    STREAMS = 76
    SESSIONS = 77
    SIZE = 78
    FIRST_SEQ = 79


class Refusal(IntEnum):
    """First byte of an ERROR frame; text follows."""

    INPUT = 1
    NOT_FOUND = 2
    BUSY = 3
    GONE = 4
    INTERNAL = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it came in."""

    type: int
    flags: int
    stream: int
    seq: int
    ack: int
    payload: bytes


def encode_frame(
    kind: int, stream: int, payload: bytes | memoryview, *, seq: int, ack: int, flags: int = 0
) -> bytes:
    """Header and payload (at most MAX_PAYLOAD bytes)."""
    head = HEADER.pack(MAGIC, kind, flags, 0, stream, len(payload), seq, ack, 0)
    crc = zlib.crc32(payload, zlib.crc32(head))
    return b"".join((head[:-4], crc.to_bytes(4, "little"), payload))


class Decoder:
    """Whole frames out of a byte stream; what is no frame is skipped up to the next one whose checksum holds.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.skipped = 0
        """Bytes that belonged to no frame."""

    def feed(self, data: bytes) -> list[Frame]:
        """Frames completed by `data`, in order."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        at, size, header_size = 0, len(buffer), HEADER.size
        while size - at >= header_size:
            magic, kind, flags, _, stream, length, seq, ack, crc = HEADER.unpack_from(buffer, at)
            if magic == MAGIC and length <= MAX_PAYLOAD:
                end = at + header_size + length
                if size < end:
                    break
                payload = bytes(buffer[at + header_size : end])
                head = bytes(buffer[at : at + header_size - 4]) + b"\0\0\0\0"
                if zlib.crc32(payload, zlib.crc32(head)) == crc:
                    frames.append(Frame(kind, flags, stream, seq, ack, payload))
                    at = end
                    continue
            found = buffer.find(MAGIC[:1], at + 1)
            to = size if found < 0 else found
            self.skipped += to - at
            at = to
        del buffer[:at]
        return frames


def encode_fields(fields: Sequence[tuple[int, int | bytes | str]]) -> bytes:
    """A message: numbers as 8 bytes, text as UTF-8 (lone surrogates as the bytes they stand for)."""
    parts: list[bytes] = []
    for tag, value in fields:
        if isinstance(value, int):
            value = value.to_bytes(8, "little")
        elif isinstance(value, str):
            value = value.encode("utf-8", "surrogateescape")
        parts += (struct.pack("<BI", tag, len(value)), value)
    return b"".join(parts)


def decode_fields(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Tags and raw values. Raises ValueError on a malformed message."""
    at = 0
    while at < len(payload):
        if len(payload) - at < 5:
            raise ValueError("a field is cut short")
        tag, length = struct.unpack_from("<BI", payload, at)
        at += 5
        if length > len(payload) - at:
            raise ValueError("a field is longer than its message")
        yield tag, payload[at : at + length]
        at += length


def numbers(payload: bytes) -> dict[int, int]:
    """The message's fields of 8 bytes as numbers."""
    return {tag: int.from_bytes(raw, "little") for tag, raw in decode_fields(payload) if len(raw) == 8}
