"""Numbers for people have no more digits than their images support."""

import pytest

from vit.runtime.numbers import format_interval, format_number, format_percent


@pytest.mark.parametrize(
    ("fraction", "count", "expected"),
    [
        (0.25, 16, "25 %"),
        (0.7967, 359, "80 %"),
        (0.7967, 1000, "79.7 %"),
        (1.0, 10, "100 %"),
        # neither 0 % nor 100 % unless it is exact
        (0.9978, 450, "99.8 %"),
        (0.002, 500, "0.2 %"),
        (0.9999, 10_000, "99.99 %"),
        (1 / 100_000, 100_000, "0.001 %"),
        (0.0, 500, "0 %"),
    ],
)
def test_percent(fraction: float, count: int, expected: str) -> None:
    assert format_percent(fraction, count) == expected


def test_intervals() -> None:
    assert format_interval((0.073, 0.524), 16) == "7–52 %"
    assert format_interval((0.9112, 0.9223), 10_000) == "91.1–92.2 %"
    assert format_interval((0.98, 0.9999), 450) == "98–100 %"


def test_numbers_have_three_digits() -> None:
    assert format_number(0.83531) == "0.835"
    assert format_number(0.037187) == "0.0372"
    assert format_number(12.345) == "12.3"
    assert format_number(1234.5) == "1,234"
