"""Quantities in people's notation, compared with Fraction and with hand-written values."""

from __future__ import annotations

import re
import signal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.units import (
    UNITS,
    exact_quantity,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_length,
    parse_quantity,
    whole_of,
)

KINDS = st.sampled_from(sorted(UNITS))
POSITIVE = st.floats(min_value=1e-12, max_value=1e24, allow_nan=False)


@given(POSITIVE | st.integers(1, 2**62).map(float), KINDS)
def test_what_is_written_exactly_reads_back_the_same(value: float, kind: str) -> None:
    assert parse_quantity(exact_quantity(value, kind), kind) == value


@given(st.integers(1, 10**6), KINDS, st.data())
def test_a_quantity_is_its_number_times_its_unit(number: int, kind: str, data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from(sorted(UNITS[kind])))
    expected = float(Fraction(number) * Fraction(UNITS[kind][unit]))
    each = "" if kind == "usd" else " per device"  # money is that of the whole run
    for text in (f"{number} {unit}", f"{number}{unit}", f"  {number}.0   {unit} ", f"{number}e0 {unit}{each}"):
        assert parse_quantity(text, kind) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("80 GiB", "bytes", 85_899_345_920),
        ("80 GB", "bytes", 80_000_000_000),
        ("300 GB/s", "bytes_per_second", 3e11),
        ("200 Gb/s", "bytes_per_second", 2.5e10),
        ("200 Gbps", "bytes_per_second", 2.5e10),
        ("3 \N{MICRO SIGN}s", "seconds", 3e-6),
        ("312 TFLOP/s", "flops_per_second", 3.12e14),
        ("1.98 PFLOP/s", "flops_per_second", 1.98e15),
        ("3 us", "seconds", 3e-6),
        ("2 h", "seconds", 7200),
        ("2.00 USD/h per device", "usd_per_hour", 2.0),
        ("0.7 kW", "watts", 700),
    ],
)
def test_values_written_by_hand(text: str, kind: str, value: float) -> None:
    assert parse_quantity(text, kind) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("80", "bytes", "'80' has no unit; write one of B, MB, GB, TB, MiB, GiB"),
        ("80 GB/s", "bytes", "'GB/s' is a unit of bytes per second"),
        ("80 gib", "bytes", "'gib' is not a known unit (did you mean GiB?)"),
        ("GiB", "bytes", "'GiB' is not a quantity"),
        ("", "bytes", "'' is not a quantity"),
        ("1e999 B", "bytes", "'1e999 B' is too large"),
        ("nan B", "bytes", "is not a quantity"),
        ("1,000 B", "bytes", "is not a quantity"),
        ("1 2 B", "bytes", "is not a quantity"),
        ("300 gbps", "bytes_per_second", "'gbps' is not a known unit (did you mean Gbps?)"),
    ],
)
def test_what_is_no_quantity_says_why(text: str, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_quantity(text, kind)


@given(st.text(max_size=20), KINDS)
def test_any_text_is_a_number_or_a_value_error(text: str, kind: str) -> None:
    try:
        value = parse_quantity(text, kind)
    except ValueError:
        return
    assert abs(value) < float("inf")


@given(st.floats(1, 1e14))
def test_bytes_for_people_are_within_the_digits_shown(value: float) -> None:
    shown = format_bytes(value).replace(",", "")
    assert parse_quantity(shown, "bytes") == pytest.approx(value, rel=0.006, abs=0.5)


@given(st.floats(1e-9, 1e9))
def test_seconds_for_people_are_within_the_digits_shown(value: float) -> None:
    assert parse_quantity(format_seconds(value).replace(",", ""), "seconds") == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_bytes(38.2 * 2**30), "38.2 GiB"),
        (format_bytes(512), "512 B"),
        (format_seconds(3.21), "3.21 s"),
        (format_seconds(0.014), "14.0 ms"),
        (format_seconds(0), "0 s"),
        (format_seconds(9000), "2.50 h"),
        (format_rate(300e9), "300 GB/s"),
        (format_rate(2039e9), "2.04 TB/s"),
        (format_count(174.6e9), "175 B"),
        (format_count(1.008e12), "1.01 T"),
        (format_count(6_738_415_616), "6.74 B"),
        (format_count(9999), "9999"),
    ],
)
def test_figures_for_people(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("32k", 32_768), (" 128K ", 131_072), ("1M", 1_048_576)])
def test_a_sequence_of_32k_is_32_times_1024_tokens(text, tokens):
    assert parse_length(text) == tokens


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("128k", "vocab_size", 128_000),
        ("1.001k", "", 1_001),
        ("1M", "steps", 1_000_000),
        ("2B", "", 2_000_000_000),
        ("32k", "sequence_length", 32_768),
        ("1M", "max_sequence_length", 1_048_576),
    ],
)
def test_a_count_is_written_as_people_say_it(text: str, name: str, count: int) -> None:
    assert whole_of(text, name) == count
    assert type(whole_of(text, name)) is int


@pytest.mark.parametrize("value", ["128", "1.0001k", "k", "12 GiB", "bf16", "", "-1k", 128, 1.5, None, True])
def test_what_is_no_count_is_left_to_the_document(value) -> None:
    assert whole_of(value) is value


@pytest.mark.parametrize("text", ["", "k", "32 kB", "3.5k", "-1", "32B"])
def test_other_lengths_are_refused(text):
    with pytest.raises(ValueError, match="write 8192 or 32k"):
        parse_length(text)


def test_a_long_number_that_is_no_quantity_takes_a_step_for_each_digit() -> None:
    """A pattern that backtracks would need time quadratic in the length: minutes of processor time for this number."""
    signal.setitimer(signal.ITIMER_PROF, 10)  # ends the process: a pattern at work hears no exception
    try:
        for text in ("1" * 200_000 + "!", "1" * 200_000 + " " * 200_000 + "!", "1." + "1" * 200_000 + "%"):
            with pytest.raises(ValueError, match="is not a quantity"):
                parse_quantity(text, "bytes")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
