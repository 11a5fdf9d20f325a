"""Finds the characters of a text that Unicode's NFC would join to one."""

import unicodedata


def composed_ranges(text: str) -> list[tuple[int, int]]:
    """Return the ranges of characters that NFC turns into one character.

    >>> composed_ranges("ae\u0301 s\u0323\u0307 \u1112\u1161\u11ab")  # the last is Hangul
    [(1, 3), (4, 7), (8, 11)]
    """
    if unicodedata.is_normalized("NFC", text):
        return []
    # A cluster is a letter with its marks. It grows until another letter begins or the text ends,
    # and is tested then.
    ranges = []
    start = 0
    for index in range(1, len(text) + 1):
        if index < len(text) and not _begins_anew(text[start:index], text[index]):
            continue
        cluster = text[start:index]
        composed = unicodedata.normalize("NFC", cluster)
        if len(composed) < len(cluster):
            # Unchanged marks at the end belong to no other character.
            end = index
            if cluster.endswith(composed[1:]):
                end -= len(composed) - 1
            ranges.append((start, end))
        start = index
    return ranges


def _begins_anew(cluster: str, character: str) -> bool:
    """Test whether a character is no mark and is not composed with those before."""
    if unicodedata.combining(character):
        return False
    # Hangul letters have no combining class, but are composed.
    together = unicodedata.normalize("NFC", cluster + character)
    apart = unicodedata.normalize("NFC", cluster) + unicodedata.normalize("NFC", character)
    return together == apart
