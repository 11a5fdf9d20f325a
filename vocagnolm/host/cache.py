"""Cached results of `datasets`: verified before they are read, removed where they are damaged."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from vocagnolm.io import file_sha256, json_or_empty, write_json

logger = logging.getLogger(__name__)


@contextmanager
def verified_cache(
    sources: Sequence[Mapping[str, str]], fingerprint: str, *, wait: bool = True
) -> Iterator[str | None]:
    """Let `map` read what it has cached under a fingerprint if it is as it was written.

    Gives its `cache_file_name`, to which it adds numbers where several processes write some each.
    Inside, `map` makes the files that it does not find; their checksums are written behind it. One
    process at a time is inside, as another one may be about to read what is removed; without `wait`
    a `filelock.Timeout` says that one is. The files lie beside the first of `sources`, the
    `cache_files` of what is mapped; without one, as of data in memory, nothing is cached.
    """
    if not sources:
        yield None
        return
    cache = Path(sources[0]["filename"]).with_name(f"cache-{fingerprint}")
    seal = cache.with_suffix(".json")
    with FileLock(cache.with_suffix(".lock"), timeout=-1 if wait else 0):
        found = _checksums(cache)
        if found and found != json_or_empty(seal):
            logger.warning("%s*.arrow were damaged, or not finished: they are made again", cache)
            for name in found:
                (cache.parent / name).unlink()
            found = {}
        try:
            yield f"{cache}.arrow"
        except OSError as error:
            # Such as a full disk, which has no name of its own.
            error.filename = error.filename or str(cache.parent)
            raise
        if not found:
            write_json(seal, _checksums(cache))


def _checksums(cache: Path) -> dict[str, str]:
    paths = sorted(cache.parent.glob(f"{cache.name}*.arrow"))
    with ThreadPoolExecutor() as pool:
        return dict(pool.map(lambda path: (path.name, file_sha256(path)), paths))
