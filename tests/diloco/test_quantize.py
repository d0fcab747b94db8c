"""Quantized numbers come back to within half a step, and error feedback makes up for the rest in time."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from basilica.diloco.quantize import BlockQuantizer, int4, int8

FORMATS = {"int8": int8, "int4": int4}
LIMIT = {"int8": 127, "int4": 7}


def roundtrip(quantizer: BlockQuantizer, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wire = np.empty(quantizer.wire_bytes(len(values)), np.uint8)
    quantizer.encode(values, wire)
    back = np.empty_like(values)
    quantizer.decode(wire, back)
    return back


@pytest.mark.parametrize("name", FORMATS)
@given(arrays.arrays(np.float32, st.integers(1, 500), elements=st.floats(-1000, 1000, width=32)))
def test_no_number_is_off_by_more_than_half_a_step(name: str, values: np.ndarray[Any, Any]) -> None:
    step = np.abs(values).max() / LIMIT[name]
    assert np.abs(roundtrip(FORMATS[name](), values) - values).max() <= step * 0.5001 + 1e-30


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 16384, 16385, 100_000])
def test_any_count_and_the_same_bytes_every_time(name: str, count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    quantizer = FORMATS[name]()
    first, second = (np.empty(quantizer.wire_bytes(count), np.uint8) for _ in range(2))
    quantizer.encode(values, first)
    FORMATS[name]().encode(values, second)
    assert first.tobytes() == second.tobytes()
    np.testing.assert_allclose(roundtrip(quantizer, values), values, atol=np.abs(values).max() / LIMIT[name])


@pytest.mark.parametrize("name", FORMATS)
def test_error_feedback_loses_nothing_in_the_long_run(name: str) -> None:
    chance = np.random.default_rng(7)
    quantizer = FORMATS[name]()
    residual, sent, arrived = (np.zeros(5000, np.float32) for _ in range(3))
    for _ in range(50):
        values = chance.standard_normal(5000).astype(np.float32)
        wire = np.empty(quantizer.wire_bytes(5000), np.uint8)
        quantizer.encode(values, wire, residual)
        back = np.empty_like(values)
        quantizer.decode(wire, back)
        sent += values
        arrived += back
    np.testing.assert_allclose(arrived + residual, sent, atol=1e-3)
    assert np.abs(residual).max() < 1.5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_as_nan_and_leaves_no_residual(name: str, bad: float) -> None:
    values = np.ones(300, np.float32)
    values[17] = bad
    quantizer, residual = FORMATS[name](), np.zeros(300, np.float32)
    wire = np.empty(quantizer.wire_bytes(300), np.uint8)
    quantizer.encode(values, wire, residual)
    back = np.empty_like(values)
    quantizer.decode(wire, back)
    assert np.isnan(back[17])
    assert np.isfinite(residual).all()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_numbers_too_small_for_a_scale_are_zeros(name: str) -> None:
    assert not roundtrip(FORMATS[name](), np.full(100, 1e-38, np.float32)).any()
    assert not roundtrip(FORMATS[name](), np.zeros(100, np.float32)).any()
