"""Numbers as people read them: counts in three digits, durations in two units."""

_PREFIXES = " KMBT"
# Seconds of each unit, and the unit below it, in which the rest is told.
_UNITS = (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1))


def in_short(count: float) -> str:
    """Write a count in three digits.

    >>> in_short(7), in_short(10_240), in_short(999_999), in_short(15e9)
    ('7', '10.2K', '1M', '15B')
    """
    # Rounded first, so that 999,999 is a million.
    count, power = float(f"{count:.3g}"), 0
    while count >= 1000 and power < len(_PREFIXES) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g}{_PREFIXES[power].strip()}"


def duration(seconds: float) -> str:
    """Write seconds in the largest unit and the next.

    >>> duration(52.4), duration(725), duration(11_220), duration(540_000)
    ('52 s', '12 m 05 s', '3 h 07 m', '6 d 06 h')
    """
    seconds = round(seconds)
    for unit, size, below, part in _UNITS:
        if seconds >= size:
            whole, rest = divmod(seconds, size)
            return f"{whole:,} {unit} {rest // part:02} {below}"
    return f"{seconds} s"
