"""A server that is asked politely: again after growing waits, by a few requests at once."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vocagnolm.io import JsonObject

if TYPE_CHECKING:
    import httpx

API_KEY = "VOCAGNOLM_API_KEY"
# Before a request is sent again; together five minutes, which a server may take to start.
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0)
_CONNECT_S, _ANSWER_S = 10.0, 600.0
# The most that a server may ask to wait for.
_LONGEST_S = 600.0
# Requests that are wrong in themselves, such as too long ones; and those that come too often.
_REFUSALS, _BUSY = (400, 413, 422), (408, 425, 429)


class RefusedRequestError(ValueError):
    """A request that the server does not answer, however often it is asked."""


@dataclass(frozen=True)
class _Fault:
    """An answer that is none, but may be when asked for again, after so many seconds at least."""

    reason: str
    wait_s: float = 0.0
    is_reached: bool = True


class Server:
    """An address, and as many requests at once as it is meant to have.

    Its key is read from the environment and sent to this host only: redirects are refused.
    """

    def __init__(self, url: str, concurrency: int):
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_address = False
        if "@" in url or "?" in url:
            raise ValueError(f"--server has a key in its address: give it as {API_KEY} instead")
        if not is_address:
            raise ValueError(f"--server {url} is no address: give http://HOST:PORT")
        # An error of httpx would show it.
        self._key = os.environ.get(API_KEY, "")
        if not re.fullmatch("[!-~]*", self._key):
            raise ValueError(f"{API_KEY} has a space, a line end, or no ASCII: set it again")
        try:
            import httpx
        except ImportError as error:
            raise ValueError("--server needs httpx: pip install 'vocagnolm[served]'") from error
        self._httpx = httpx
        self.url = url.rstrip("/").removesuffix("/v1")
        self.host, self.concurrency = parts.netloc, concurrency
        self.waits_s, self.asked_again = WAITS_S, 0

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[httpx.AsyncClient]:
        """Keep connections open meanwhile, for `ask`."""
        async with self._httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=self._httpx.Timeout(_ANSWER_S, connect=_CONNECT_S, pool=None),
            limits=self._httpx.Limits(max_connections=self.concurrency),
        ) as client:
            yield client

    async def ask(
        self, client: httpx.AsyncClient, path: str, body: JsonObject, times: int | None = None
    ) -> JsonObject:
        """Return the answer to a request; an OSError if all attempts fail.

        A RefusedRequestError where the server finds it wrong, another ValueError where it sends
        elsewhere, or does not know the path, the model or the key.
        """
        waits_s = self.waits_s[:times]
        for wait_s in (*waits_s, None):
            found = await self._answer(client, path, body)
            if not isinstance(found, _Fault):
                return found
            if wait_s is not None:
                self.asked_again += 1
                # Not all at once, as those that failed at once would.
                least_s = wait_s * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(min(found.wait_s, _LONGEST_S), least_s))
        assert isinstance(found, _Fault)
        kind = OSError if found.is_reached else ConnectionError
        raise kind(
            f"--server {self.url} has failed {len(waits_s) + 1} times, at last with "
            f"{found.reason}: look at it, and give the same command again to continue"
        )

    async def _answer(
        self, client: httpx.AsyncClient, path: str, body: JsonObject
    ) -> JsonObject | _Fault:
        try:
            response = await client.post(self.url + path, json=body)
        except self._httpx.RequestError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ValueError(f"--server {self.url}: {error}") from error
            return _Fault(f"{type(error).__name__} {error}", is_reached=False)
        status = response.status_code
        if response.is_success:
            try:
                answer = response.json()
            except ValueError:
                answer = None
            if isinstance(answer, dict):
                return answer
        # Some servers repeat the key that they refuse.
        text = response.text.replace(self._key, "***") if self._key else response.text
        said = " ".join(f"{status} {response.reason_phrase} {text[:200]}".split())
        if response.is_success:
            return _Fault(f"an answer that is cut, or no JSON: {said}")
        if status >= 500 or status in _BUSY:
            return _Fault(said, _retry_after_s(response.headers.get("retry-after", "")))
        if response.is_redirect:
            elsewhere = response.headers.get("location")
            raise ValueError(f"--server {self.url} sends to {elsewhere}, which is not followed")
        if status in _REFUSALS:
            raise RefusedRequestError(said)
        raise ValueError(f"--server {self.url}{path} answers {said}")


def _retry_after_s(header: str) -> float:
    """Read a header of seconds, or of a date; 0 for none."""
    try:
        if header[:1].isdigit():
            return float(header)
        return parsedate_to_datetime(header).timestamp() - time.time()
    except ValueError:
        return 0.0
