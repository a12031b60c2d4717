"""Measures the idle share of a run's engines during training, from the engines' own counters."""

from __future__ import annotations

import time

import httpx

from areal_agents.direct_http import direct_client
from areal_agents.secret_variables import bearer


class EngineBusy:
    """The share of the training time in which the engines were not sampling, as a mean over the engines.

    The counter of a restarted engine starts at zero. An engine that does not answer is queried again later.

    Args:
        urls: the URLs of the engines; (): none is asked, and the share is not known.
        key: the key of the engines; "" if they have none.
        timeout_s: longest wait in seconds for one answer.
    """

    def __init__(self, urls: tuple[str, ...], *, key: str = "", timeout_s: float = 2.0) -> None:
        self._timeout_s = timeout_s
        self._headers = bearer(key)
        self._urls = urls
        self._counted = True  # whether the engines count their busy time; SGLang does not
        self._busy_s = 0.0
        self._last: dict[str, float] = {}  # by URL
        self._from: float | None = None
        self._to = 0.0

    def follow(self, done: int, steps: int) -> None:
        """Read the counters while the trainer is between its first and its last step."""
        if not (self._urls and 1 <= done < steps and self._counted):
            return
        for url in self._urls:
            self._read_counter(url)
        self._to = time.monotonic()
        self._from = self._from or self._to

    def idle_share(self) -> float | None:
        """Return the idle share, from 0 to 1, or None if an engine does not count its busy time."""
        if not self._counted or self._from is None or self._to <= self._from:
            return None
        return max(0.0, 1.0 - self._busy_s / (self._to - self._from) / len(self._urls))

    def _read_counter(self, url: str) -> None:
        try:
            with direct_client(timeout_s=self._timeout_s, headers=self._headers) as client:
                info = client.get(url + "/get_server_info").json()
        except (httpx.HTTPError, ValueError):
            return
        if "busy_s" not in info:
            self._counted = False
            return
        now, before = float(info["busy_s"]), self._last.get(url)
        if before is not None:
            self._busy_s += now - before if now >= before else now
        self._last[url] = now
