"""Numbers as people read them: a decimal only where the number of images supports it."""

# From so many images on, a tenth of a percent is larger than one image.
_ONE_DECIMAL = 1000


def format_percent(fraction: float, count: int) -> str:
    """Return a fraction of `count` images in percent, such as "25 %"."""
    # neither 0 % nor 100 % for a fraction that is only near it
    is_near_end = 0 < fraction < 0.005 or 0.995 <= fraction < 1
    digits = int(count >= _ONE_DECIMAL or is_near_end)
    return f"{100 * fraction:.{digits}f} %"


def format_interval(interval: tuple[float, float], count: int) -> str:
    """Return an interval of a fraction of `count` images in percent, such as "7–52 %"."""
    digits = int(count >= _ONE_DECIMAL)
    low, high = (f"{100 * end:.{digits}f}" for end in interval)
    return f"{low}–{high} %"


def format_difference(difference: float, count: int) -> str:
    """Return a difference of two fractions of `count` images in percentage points, such as "+13"."""
    return f"{100 * difference:+.{int(count >= _ONE_DECIMAL)}f}"


def format_number(value: float) -> str:
    """Return a number with three significant digits, or whole from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
