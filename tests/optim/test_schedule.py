"""Schedules by their numbers."""

import math

import pytest

from vit.optim.optimizer import schedule_factor


def factors(total_steps=10, **arguments) -> list[float]:
    """Learning rates that the steps see."""
    return [
        schedule_factor(step, total_steps=total_steps, **arguments) for step in range(total_steps)
    ]


def test_warm_up_rises_in_equal_steps_and_reaches_the_full_rate():
    rates = factors(name="linear", warmup_steps=4)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_cosine_is_half_way_down_in_the_middle():
    rates = factors(name="cosine", warmup_steps=0)
    assert rates[5] == pytest.approx(0.5)
    assert rates == pytest.approx([0.5 + 0.5 * math.cos(math.pi * step / 10) for step in range(10)])


def test_constant_cooldown_stays_then_falls_in_the_last_quarter():
    rates = factors(name="constant-cooldown", warmup_steps=1, total_steps=16)
    assert rates == pytest.approx([0.5, *[1] * 12, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("name", ["cosine", "linear", "constant-cooldown"])
def test_the_rate_after_the_run_is_the_final_one(name):
    common = {"name": name, "warmup_steps": 2, "total_steps": 10}
    assert schedule_factor(10, **common) == 0
    assert schedule_factor(99, **common) == 0
