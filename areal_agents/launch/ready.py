"""Waits for HTTP servers to answer, while a check watches the processes that they depend on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from areal_agents.direct_http import direct_client
from areal_agents.errors import ArealAgentsError, ConfigError
from areal_agents.secret_variables import ENGINE_KEY, bearer
from areal_agents.tls import certificate_fault

READY_TIMEOUT_S = 180.0
ANSWER_S = 5.0  # longest wait for one answer
POLL_S = 0.1


def wait_until_ready(
    url: str,
    *,
    check: Callable[[], object] = lambda: None,
    timeout_s: float = READY_TIMEOUT_S,
    waiting: Callable[[float], object] = lambda waited_s: None,
) -> None:
    """Return when `url` answers with status 200.

    Args:
        url: the URL to request.
        check: called before each attempt; an exception from it ends the wait.
        timeout_s: longest wait in seconds.
        waiting: called before each attempt with the seconds that have passed.

    Raises:
        ArealAgentsError: there was no such answer in time.
    """
    begun = time.monotonic()
    with direct_client(timeout_s=ANSWER_S) as client:
        while (waited_s := time.monotonic() - begun) < timeout_s:
            check()
            waiting(waited_s)
            if _answers(client, url):
                return
            time.sleep(POLL_S)
    raise ArealAgentsError(f"{url} did not answer within {timeout_s:.0f} s; see the logs of the run")


def wait_until_any_ready(
    urls: Sequence[str],
    *,
    check: Callable[[], object] = lambda: None,
    timeout_s: float = READY_TIMEOUT_S,
    key: str = "",
    waiting: Callable[[float], object] = lambda waited_s: None,
) -> tuple[str, ...]:
    """Wait until one of `urls` answers with status 200, and return all that do.

    Args:
        urls: the URLs to request, at least one.
        check: called before each round; an exception from it ends the wait.
        timeout_s: longest wait in seconds for the first answer.
        key: the key that is sent with the requests; "": none.
        waiting: called before each round with the seconds that have passed.

    Raises:
        ArealAgentsError: none answered in time.
        ConfigError: one refused the key.
    """
    begun = time.monotonic()
    with (
        direct_client(timeout_s=ANSWER_S, headers=bearer(key)) as client,
        ThreadPoolExecutor(len(urls)) as threads,
    ):
        while (waited_s := time.monotonic() - begun) < timeout_s:
            check()
            waiting(waited_s)
            answers = list(threads.map(lambda url: _answers(client, url), urls))
            if any(answers):
                return tuple(url for url, answered in zip(urls, answers, strict=True) if answered)
            time.sleep(POLL_S)
    raise ArealAgentsError(f"none of {', '.join(urls)} answered within {timeout_s:.0f} s; see their logs")


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        status = client.get(url).status_code
    except httpx.TransportError as error:
        if fault := certificate_fault(url, error):  # which no waiting changes
            raise ConfigError(fault) from None
        return False  # not listening yet
    if status in (401, 403):
        raise ConfigError(
            f"{url} refused the request, which had another key than the server or none ({status}); give the "
            f"key of engines that are running already as {ENGINE_KEY}"
        )
    return status == 200
