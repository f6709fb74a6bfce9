"""Format numbers for people: bytes in code, GiB in print; seconds everywhere."""

GIB = 1 << 30
MIB = 1 << 20


def format_bytes(value_bytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or more.

    >>> format_bytes(3 * 1024**3), format_bytes(512)
    ('3.0 GiB', '512 B')
    """
    size = float(value_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 1024 or unit == "PiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable: the last unit always returns")


def format_count(value: float) -> str:
    """A count with a decimal prefix.

    >>> format_count(6_815_744), format_count(950), format_count(405e9)
    ('6.8M', '950', '405.0B')
    """
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.1f}{suffix}"
    return f"{value:,.0f}"


def format_seconds(value_s: float) -> str:
    """Seconds with a unit that suits their size.

    >>> format_seconds(0.0123), format_seconds(75.0), format_seconds(1.5)
    ('12.3 ms', '1 min 15 s', '1.50 s')
    """
    if value_s < 1:
        return f"{value_s * 1e3:.1f} ms"
    if value_s < 60:
        return f"{value_s:.2f} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
