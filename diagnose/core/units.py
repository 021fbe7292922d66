"""The one place where quantities become text."""

from __future__ import annotations

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution as a multiple of its median absolute deviation."""


def format_ms(time_ns: float) -> str:
    """Formats nanoseconds as milliseconds with about three digits: `412 ms`, `41.2 ms`, `0.41 ms`.

    What would show no two digits of its own so is given in microseconds: `41 us`.
    """
    value_ms = time_ns / NS_PER_MS
    if 0 < value_ms < 0.095:
        return f"{time_ns / NS_PER_US:.{0 if time_ns >= 9_950 else 1}f} us"
    digits = 0 if value_ms >= 99.95 else 1 if value_ms >= 9.995 else 2
    return f"{value_ms:,.{digits}f} ms"


def format_duration(time_ns: float) -> str:
    """Formats nanoseconds in the unit a person would choose: `38 us`, `41.2 ms`, `3.1 s`, `4 min 10 s`."""
    if time_ns < NS_PER_MS:
        return f"{time_ns / NS_PER_US:.0f} us"
    if time_ns < NS_PER_S:
        return format_ms(time_ns)
    seconds = time_ns / NS_PER_S
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def format_share(share: float) -> str:
    """Formats a share of 0 to 1 as a percentage: `41 %`, `4.1 %`, `0 %`."""
    percent = 100 * share
    if percent >= 9.95 or percent == 0:
        return f"{percent:.0f} %"
    return f"{percent:.1f} %"


def format_rate(per_second: float) -> str:
    """Formats a rate with about three digits: `12,400`, `412`, `41.2`, `0.41`."""
    digits = 0 if per_second >= 99.95 else 1 if per_second >= 9.995 else 2
    return f"{per_second:,.{digits}f}"


def format_bytes(num_bytes: float) -> str:
    """Formats bytes in binary units: `412 B`, `41.2 KiB`, `3.1 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_part(time_ns: float, whole_ns: float) -> str:
    """Formats part of a whole, so that all parts of one whole have the same unit and decimals.

    The whole decides: `1.23 s` of 40 s, `12.3 ms` of 400 ms, `1.23 ms` of 40 ms, `0.123 ms` of 4 ms.
    """
    if whole_ns >= 5 * NS_PER_S:
        return f"{time_ns / NS_PER_S:,.2f} s"
    digits = 1 if whole_ns >= 100 * NS_PER_MS else 2 if whole_ns >= 10 * NS_PER_MS else 3
    return f"{time_ns / NS_PER_MS:,.{digits}f} ms"


def format_speedup(speedup: float) -> str:
    """Formats a ratio of speeds: `1.08x`, `1.4x`, `12x`."""
    return f"{speedup:.{_speedup_digits(speedup)}f}x"


def format_gain(speedup: float, low: float, high: float) -> str:
    """Formats a ratio of speeds with its interval: `1.4x (1.2 to 1.6)`."""
    digits = _speedup_digits(speedup)
    if digits == 1 and f"{low:.1f}" == f"{high:.1f}":
        digits = 2  # an interval this narrow shows only then
    return f"{speedup:.{digits}f}x ({low:.{digits}f} to {high:.{digits}f})"


def _speedup_digits(speedup: float) -> int:
    return 2 if speedup < 1.2 else 1 if speedup < 9.95 else 0
