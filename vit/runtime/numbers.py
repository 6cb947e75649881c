"""Numbers as people read them: a decimal only where the number of images supports it."""

# From so many images on, a tenth of a percent is larger than one image.
_ONE_DECIMAL = 1000
_MAX_DECIMALS = 6


def format_percent(fraction: float, count: int) -> str:
    """Return a fraction of `count` images in percent, such as "25 %"."""
    percent = 100 * fraction
    digits = int(count >= _ONE_DECIMAL)
    # neither 0 % nor 100 % for a fraction that is only near it
    while round(percent, digits) in (0, 100) and percent not in (0, 100) and digits < _MAX_DECIMALS:
        digits += 1
    return f"{percent:.{digits}f} %"


def format_interval(interval: tuple[float, float], count: int) -> str:
    """Return an interval of a fraction of `count` images in percent, such as "7–52 %"."""
    digits = int(count >= _ONE_DECIMAL)
    low, high = (f"{100 * end:.{digits}f}" for end in interval)
    return f"{low}–{high} %"


def format_number(value: float) -> str:
    """Return a number with three significant digits, or whole from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
