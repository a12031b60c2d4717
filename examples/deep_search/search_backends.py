"""What the tools of the agent call: an index in this process, a retrieval server, or the web.

All have one interface. A page that does not exist is the model's doing, and is told to it (`PageNotFound`). A
backend that does not answer, or refuses its key, is not: it raises `BackendError`, which fails the attempt.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from retrieval import Index, Mode

from areal_agents.errors import ConfigError

SERPER_URL = "https://google.serper.dev/search"
JINA_URL = "https://r.jina.ai/"
ATTEMPTS = 4  # of one call; those after the first wait, longer each time
TIMEOUT_S = 60.0  # of one request; a reader renders the page meanwhile
CONNECTIONS = 64
_PASSING = (408, 425, 429)  # statuses, besides 5xx, that another attempt may not get
_REFUSED_KEY = (401, 402, 403)


@dataclass(frozen=True, slots=True)
class Result:
    """A result of a search; `text` is a passage, or the snippet of a page."""

    title: str
    url: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """A page, with all of its text."""

    title: str
    url: str
    text: str


class PageNotFound(Exception):
    """There is no such page, or it cannot be read."""


class BackendError(Exception):
    """The backend did not answer, or not as it should."""


class Backend(Protocol):
    """Where the agent searches and reads."""

    async def search(self, query: str, k: int) -> Sequence[Result]:
        """Return the best k results, the best first. Raises BackendError."""
        ...

    async def access(self, url: str) -> Page:
        """Return the page at a URL that a result had. Raises PageNotFound, BackendError."""
        ...


class LocalIndex:
    """An index in this process, for a small corpus: searching it takes less than a millisecond."""

    def __init__(self, index: Index, mode: Mode = "bm25") -> None:
        self.index = index
        self._mode = mode

    async def search(self, query: str, k: int) -> Sequence[Result]:
        """See `Backend.search`."""
        [hits] = self.index.search([query], k=k, mode=self._mode)
        passages = [hit.passage for hit in hits]
        return [Result(passage.title, passage.url or passage.id, passage.text) for passage in passages]

    async def access(self, url: str) -> Page:
        """See `Backend.access`."""
        passages = self.index.page(url)
        if not passages:
            raise PageNotFound(f"there is no page {url}")
        text = "\n\n".join(passage.text for passage in passages)
        return Page(passages[0].title, passages[0].url or passages[0].id, text)


class RetrievalServer:
    """The server of `python -m retrieval serve`.

    Args:
        url: its base URL.
        mode: "bm25", "dense" or "fused".
    """

    def __init__(self, url: str, mode: str = "bm25") -> None:
        self._url = url.rstrip("/")
        self._mode = mode
        limits = httpx.Limits(max_connections=CONNECTIONS)
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, limits=limits)  # a local server

    async def search(self, query: str, k: int) -> Sequence[Result]:
        """See `Backend.search`."""
        body = {"queries": [query], "k": k, "mode": self._mode}
        answer = await _post(self._http, f"{self._url}/retrieve", body)
        [hits] = _field(answer, "results", list)
        return [Result(hit["title"], hit["url"] or hit["id"], hit["text"]) for hit in hits]

    async def access(self, url: str) -> Page:
        """See `Backend.access`."""
        answer = await _post(self._http, f"{self._url}/access", {"url": url}, no_page=(404,))
        return Page(answer["title"], answer["url"] or answer["id"], _field(answer, "text", str))


class Web:
    """Google's results by Serper, and pages by Jina's reader.

    Args:
        serper_key, jina_key: the keys of the two services.
        search_url, read_url: where they are.
    """

    def __init__(
        self, serper_key: str, jina_key: str, *, search_url: str = SERPER_URL, read_url: str = JINA_URL
    ) -> None:
        self._search_url = search_url
        self._read_url = read_url
        self._search_headers = {"X-API-KEY": serper_key}
        self._read_headers = {"Authorization": f"Bearer {jina_key}", "Accept": "application/json"}
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=CONNECTIONS))

    async def search(self, query: str, k: int) -> Sequence[Result]:
        """See `Backend.search`."""
        answer = await _post(
            self._http, self._search_url, {"q": query, "num": k}, headers=self._search_headers
        )
        found = answer.get("organic", [])  # absent if there are no results
        return [
            Result(one.get("title", ""), one["link"], one.get("snippet", ""))
            for one in found
            if "link" in one
        ][:k]

    async def access(self, url: str) -> Page:
        """See `Backend.access`."""
        if not url.startswith(("http://", "https://")):
            raise PageNotFound(f"a URL starts with http:// or https://, got {url[:200]}")
        unreadable = (400, 404, 410, 422, 451)
        answer = await _post(
            self._http, self._read_url, {"url": url}, headers=self._read_headers, no_page=unreadable
        )
        data = _field(answer, "data", dict)
        return Page(data.get("title") or "", data.get("url") or url, _field(data, "content", str))


def backend_of(environment: Mapping[str, str] = os.environ) -> Backend:
    """Return the backend that environment variables name.

    RETRIEVAL_URL is a retrieval server, RETRIEVAL_MODE its mode; SERPER_API_KEY and JINA_API_KEY are the web.

    Raises:
        ConfigError: they name none.
    """
    if url := environment.get("RETRIEVAL_URL"):
        return RetrievalServer(url, environment.get("RETRIEVAL_MODE", "bm25"))
    keys = [environment.get(name, "") for name in ("SERPER_API_KEY", "JINA_API_KEY")]
    if all(keys):
        return Web(*keys)
    raise ConfigError(
        "the agent has nowhere to search: set RETRIEVAL_URL to a server that `python -m retrieval serve` "
        "started, or SERPER_API_KEY and JINA_API_KEY for the web"
    )


async def _post(
    http: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    no_page: Sequence[int] = (),
) -> dict[str, Any]:
    """POST a body and return the JSON object of the answer, repeating what may be a passing failure.

    Args:
        no_page: the statuses that say that there is no such page.

    Raises:
        PageNotFound, BackendError: see the module.
    """
    last = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(random.uniform(0.25, 0.5) * 2.0**attempt)
        try:
            response = await http.post(url, json=body, headers=headers)
        except httpx.TransportError as error:
            last = str(error) or type(error).__name__
            continue
        if response.is_success:
            return _json_object(response)
        last = f"{response.status_code} {response.text[:500]}"
        if response.status_code in no_page:
            raise PageNotFound(f"the page cannot be read: {last[:200]}")
        if response.status_code in _REFUSED_KEY:
            raise BackendError(f"{url} refused the key: {last}")
        if response.status_code < 500 and response.status_code not in _PASSING:
            break
    raise BackendError(f"{url} gave no answer: {last}")


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise BackendError(f"{response.url} must answer with a JSON object, got {response.text[:200]!r}")
    return answer


def _field(answer: Mapping[str, Any], name: str, kind: type) -> Any:
    value = answer.get(name)
    if not isinstance(value, kind):
        raise BackendError(f"the answer must have {name}, a {kind.__name__}; it has {sorted(answer)}")
    return value
