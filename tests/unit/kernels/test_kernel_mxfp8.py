"""MXFP8 against a table of E4M3 written from its definition."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels import mxfp8


def e4m3(code: int) -> float:
    """The value of one byte: sign, four exponent bits (bias 7), three mantissa bits."""
    sign, exponent, mantissa = (-1.0 if code & 0x80 else 1.0), (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 7 - 3)


TABLE = [e4m3(code) for code in range(256)]
FINITE = TABLE[:0x7F]
"""Values of the non-negative codes 0..0x7E, rising."""


def nearest(x: float) -> float:
    """The E4M3 value next to x, of two equally near the one with the even code; beyond 448 it is 448."""
    code = min(range(len(FINITE)), key=lambda c: (abs(FINITE[c] - abs(x)), c % 2))
    return math.copysign(FINITE[code], x)


def block(*values: float) -> Tensor:
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]], dtype=torch.float32)


def test_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    for byte, unit in ((127, 1.0), (130, 8.0), (0, math.ldexp(1.0, -127))):
        got = mxfp8.decode(codes.view(torch.float8_e4m3fn), torch.full((8, 1), byte, dtype=torch.uint8)).flatten()
        want = torch.tensor(TABLE, dtype=torch.float64) * unit
        torch.testing.assert_close(got.double(), want, rtol=0, atol=0, equal_nan=True)
    assert got.isnan().sum() == 2
    assert max(FINITE) == 448.0


def test_every_value_encodes_to_its_code() -> None:
    for code, value in enumerate(TABLE):
        if math.isnan(value):
            continue
        elements, scale = mxfp8.encode(block(value, 448.0))
        assert scale.item() == 127
        assert elements.view(torch.uint8)[0, 0].item() == code
        assert torch.tensor(value).to(torch.float8_e4m3fn).view(torch.uint8).item() == code


def test_scale_bytes() -> None:
    for amax, byte in ((1.0, 119), (1.999, 119), (2.0, 120), (448.0, 127), (511.9, 127), (512.0, 128),
                       (2.0**-119, 0), (2.0**-130, 0), (3e38, 246)):
        assert mxfp8.encode(block(0.0, -amax))[1].item() == byte, amax


def test_ties_go_to_the_even_code_and_large_values_saturate() -> None:
    ties = [(low + high) / 2 for low, high in pairwise(FINITE)]
    for tie in ties:
        got = mxfp8.round_trip(block(tie, -tie, 448.0))
        assert got[0, 0].item() == -got[0, 1].item() == nearest(tie), tie
    assert mxfp8.round_trip(block(511.0, -449.0, 1.0))[0, :3].tolist() == [448.0, -448.0, 1.0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(-100, 100), st.floats(0.1, 6.0))
def test_every_element_is_the_nearest_value(seed: int, exponent: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 64, generator=generator) * torch.exp(spread * torch.randn(1, 64, generator=generator))
    x = torch.ldexp(x, torch.tensor(exponent))
    elements, scale = mxfp8.encode(x)
    got = mxfp8.decode(elements, scale)
    for j, (value, found) in enumerate(zip(x[0].tolist(), got[0].tolist(), strict=True)):
        unit = math.ldexp(1.0, int(scale[0, j // 32]) - 127)
        assert found == nearest(value / unit) * unit
    assert torch.equal(mxfp8.round_trip(got), got)


def test_shapes_and_dtypes() -> None:
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    elements, scale = mxfp8.encode(x)
    assert (elements.shape, elements.dtype) == ((2, 3, 64), torch.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((2, 3, 2), torch.uint8)
    assert torch.equal(mxfp8.round_trip(x).float(), mxfp8.decode(elements, scale))
    assert mxfp8.round_trip(x).dtype is torch.bfloat16
    assert mxfp8.round_trip(torch.zeros(0, 64)).shape == (0, 64)


def test_zero_blocks() -> None:
    x = torch.zeros(1, 64)
    x[0, 40] = -3.0
    elements, scale = mxfp8.encode(x)
    assert scale.tolist() == [[127, 120]]
    assert not elements.view(torch.uint8)[0, :32].any()
    assert torch.equal(mxfp8.decode(elements, scale), x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_refused(bad: float) -> None:
    with pytest.raises(InputError, match="NaN or infinity"):
        mxfp8.encode(block(1.0, bad))


@pytest.mark.parametrize("width", [1, 31, 48])
def test_widths_that_do_not_fill_blocks_are_refused(width: int) -> None:
    with pytest.raises(InputError, match=f"width = {width}: expected a multiple of 32"):
        mxfp8.encode(torch.zeros(2, width))
