"""Texts before any two are aligned: files, offsets, bytes of tokens, places to cut, columns."""
