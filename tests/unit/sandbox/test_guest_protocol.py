"""Frames and fields: round trips, and a decoder that nothing can stop."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from tidemill.sandbox.guest.protocol import (
    HEADER,
    MAX_PAYLOAD,
    PADDING,
    Decoder,
    decode_fields,
    encode_fields,
    encode_frame,
    numbers,
)

payloads = st.one_of(st.binary(max_size=300), st.sampled_from([b"", b"TDM1", b"T" * 100, bytes(MAX_PAYLOAD)]))
frames = st.tuples(st.integers(0, 255), st.integers(0, 3), st.integers(0, 2**32 - 1), payloads)


@given(st.lists(frames, max_size=5), st.lists(st.integers(1, 500), max_size=20))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    made: list[tuple[int, int, int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(
        encode_frame(kind, stream, payload, seq=i + 1, ack=i, flags=flags)
        for i, (kind, flags, stream, payload) in enumerate(made)
    )
    decoder = Decoder()
    out = []
    for cut in cuts:
        out += decoder.feed(data[:cut])
        data = data[cut:]
    out += decoder.feed(data)
    assert [(f.type, f.flags, f.stream, f.payload) for f in out] == made
    assert [(f.seq, f.ack) for f in out] == [(i + 1, i) for i in range(len(made))]
    assert decoder.skipped == 0


@given(st.binary(max_size=400), frames)
def test_a_frame_behind_rubbish_is_found(rubbish: bytes, frame: tuple[int, int, int, bytes]) -> None:
    kind, flags, stream, payload = frame
    good = encode_frame(kind, stream, payload, seq=1, ack=0, flags=flags)
    decoder = Decoder()
    # Padding completes whatever the rubbish began.
    out = decoder.feed(rubbish + PADDING + good)
    assert [f.payload for f in out] == [payload]
    assert decoder.skipped == len(rubbish) + len(PADDING)


@given(st.integers(0, HEADER.size + 49), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(byte: int, bit: int) -> None:
    damaged = bytearray(encode_frame(3, 9, b"x" * 50, seq=1, ack=0))
    damaged[byte] ^= 1 << bit
    good = encode_frame(3, 9, b"after", seq=2, ack=0)
    assert [f.payload for f in Decoder().feed(bytes(damaged) + PADDING + good)] == [b"after"]


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=50) | st.integers(0, 2**64 - 1))))
def test_fields_round_trip(fields: list[tuple[int, int | bytes]]) -> None:
    raw = [(tag, v.to_bytes(8, "little") if isinstance(v, int) else v) for tag, v in fields]
    assert list(decode_fields(encode_fields(fields))) == raw
    assert numbers(encode_fields(fields)) == {tag: int.from_bytes(v, "little") for tag, v in raw if len(v) == 8}


@given(st.binary(max_size=100))
def test_malformed_fields_raise_only_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        for tag, value in decode_fields(data):
            assert 0 <= tag < 256
            assert len(value) <= len(data)


def test_lone_surrogates_stand_for_bytes() -> None:
    assert list(decode_fields(encode_fields([(1, b"\xff/a".decode("utf-8", "surrogateescape"))]))) == [(1, b"\xff/a")]
