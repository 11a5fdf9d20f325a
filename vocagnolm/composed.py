"""Finds the characters of a text that Unicode's NFC composes to one."""

import unicodedata


def composed_ranges(text: str) -> list[tuple[int, int]]:
    """Return the ranges of characters that NFC makes one character of.

    >>> composed_ranges("ae\u0301 s\u0323\u0307 \u1112\u1161\u11ab")  # the last is Hangul
    [(1, 3), (4, 7), (8, 11)]
    """
    if unicodedata.is_normalized("NFC", text):
        return []
    # A cluster is a letter with its marks. It grows until a character begins anew, or the text
    # ends, and is judged then.
    ranges = []
    start = 0
    for index in range(1, len(text) + 1):
        if index < len(text) and not _begins_anew(text[start:index], text[index]):
            continue
        cluster = text[start:index]
        composed = unicodedata.normalize("NFC", cluster)
        if len(composed) < len(cluster):
            # Marks at the end that stay as they are belong to no other character.
            end = index
            if cluster.endswith(composed[1:]):
                end -= len(composed) - 1
            ranges.append((start, end))
        start = index
    return ranges


def _begins_anew(cluster: str, character: str) -> bool:
    """Test whether a character is neither a mark of those before it nor composed with them."""
    if unicodedata.combining(character):
        return False
    # Hangul letters have no combining class and are composed all the same.
    together = unicodedata.normalize("NFC", cluster + character)
    apart = unicodedata.normalize("NFC", cluster) + unicodedata.normalize("NFC", character)
    return together == apart
