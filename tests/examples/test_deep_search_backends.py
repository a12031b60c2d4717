"""All back ends of the deep-search agent behave the same: the index, its server, and the web."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import search_backends
import uvicorn
from retrieval import Index, Passage, build_app, build_index
from search_backends import Backend, BackendError, LocalIndex, PageNotFound, RetrievalServer, Web, backend_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from areal_agents.errors import ConfigError
from areal_agents.inference.ports import reserved_ports
from areal_agents.sockets import listen, url_of

PASSAGES = [
    Passage("1", "The Rhône flows through Lyon.", "Lyon", "https://x.example/lyon"),
    Passage("2", "Lyon is large.", "Lyon, continued", "https://x.example/lyon"),
    Passage("3", "Lyon has a mayor.", "Mayor", "https://x.example/mayor"),
]
SERPER_KEY, JINA_KEY = "serper-key", "jina-key"


def web_services(index: Index) -> Starlette:
    """Imitations of Serper and of Jina's reader, as documented, over the pages of an index.

    The first request for a page whose URL has "status-N" gets this status, and later ones get the page.
    """
    answered: set[str] = set()

    async def serper(request: Request) -> Response:
        if request.headers.get("X-API-KEY") != SERPER_KEY:
            return JSONResponse({"message": "Unauthorized.", "statusCode": 403}, 403)
        body = await request.json()
        [hits] = index.search([body["q"]], k=body["num"])
        organic = [
            {"title": h.passage.title, "link": h.passage.url, "snippet": h.passage.text, "position": n}
            for n, h in enumerate(hits, start=1)
        ]
        found: dict[str, Any] = {"searchParameters": {**body, "type": "search", "engine": "google"}}
        return JSONResponse({**found, **({"organic": organic} if organic else {}), "credits": 1})

    async def jina(request: Request) -> Response:
        if request.headers.get("Authorization") != f"Bearer {JINA_KEY}":
            return JSONResponse({"code": 401, "name": "AuthenticationFailedError"}, 401)
        assert request.headers["Accept"] == "application/json"
        url = (await request.json())["url"]
        status = url.partition("status-")[2]
        if status and url not in answered:
            answered.add(url)
            return Response("busy", int(status))
        if "no-json" in url:
            return Response("<html>")
        pages = index.page("https://x.example/lyon" if status else url)
        if not pages:
            return JSONResponse({"code": 422, "status": 42206, "message": "No content"}, 422)
        data = {"title": pages[0].title, "url": url, "content": "\n\n".join(page.text for page in pages)}
        return JSONResponse({"code": 200, "status": 20000, "data": {**data, "usage": {"tokens": 9}}})

    return Starlette(
        routes=[
            Route("/serper", serper, methods=["POST"]),
            Route("/jina", jina, methods=["POST"]),
            Mount("/local", build_app(index)),
        ]
    )


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    folder = tmp_path_factory.mktemp("backends") / "index"
    build_index(PASSAGES, folder)
    opened = Index(folder)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def url(index: Index) -> Iterator[str]:
    with serving(web_services(index)) as url:
        yield url


def web(url: str, serper_key: str = SERPER_KEY, jina_key: str = JINA_KEY) -> Web:
    return Web(serper_key, jina_key, search_url=f"{url}/serper", read_url=f"{url}/jina")


@pytest.fixture(params=["index", "server", "web"])
def backend(request: pytest.FixtureRequest, index: Index, url: str) -> Backend:
    if request.param == "index":
        return LocalIndex(index)
    return RetrievalServer(f"{url}/local/") if request.param == "server" else web(url)


async def test_a_search_finds_pages_and_access_reads_them(backend: Backend) -> None:
    [mayor] = await backend.search("mayor", 5)
    assert (mayor.title, mayor.url, mayor.text) == ("Mayor", "https://x.example/mayor", "Lyon has a mayor.")
    assert len(await backend.search("Lyon", 2)) == 2 and len(await backend.search("Lyon", 5)) == 3
    assert not await backend.search("zzz", 5)
    page = await backend.access("https://x.example/lyon")
    assert (page.title, page.url) == ("Lyon", "https://x.example/lyon")
    assert page.text == "The Rhône flows through Lyon.\n\nLyon is large."
    for nowhere in ("https://x.example/nowhere", "nonsense"):
        with pytest.raises(PageNotFound):
            await backend.access(nowhere)


async def test_many_concurrent_searches_succeed(backend: Backend) -> None:
    found = await asyncio.gather(*(backend.search("mayor", 1) for _ in range(40)))
    assert {result.url for [result] in found} == {"https://x.example/mayor"}


@pytest.mark.parametrize("status", [429, 503])
async def test_a_request_is_repeated_after_a_temporary_failure(
    url: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_backends.random, "uniform", lambda low, high: 0.0)  # the back-off
    page = await web(url).access(f"https://x.example/status-{status}")
    assert page.title == "Lyon"


async def test_failures_that_the_model_did_not_cause_raise_an_error(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendError, match="refused the key: 403"):
        await web(url, serper_key="other").search("Lyon", 1)
    with pytest.raises(BackendError, match="refused the key: 401"):
        await web(url, jina_key="other").access("https://x.example/lyon")
    with pytest.raises(BackendError, match="must answer with a JSON object"):
        await web(url).access("https://x.example/no-json")
    with pytest.raises(BackendError, match="gave no answer: 400.*mode must be one of bm25"):
        await RetrievalServer(f"{url}/local", "dense").search("Lyon", 1)
    monkeypatch.setattr(search_backends, "ATTEMPTS", 1)
    with reserved_ports(1) as (port,), pytest.raises(BackendError, match="gave no answer"):
        await RetrievalServer(f"http://127.0.0.1:{port}").search("Lyon", 1)


def test_environment_variables_select_the_backend() -> None:
    assert isinstance(backend_of({"RETRIEVAL_URL": "http://127.0.0.1:1"}), RetrievalServer)
    assert isinstance(backend_of({"SERPER_API_KEY": "a", "JINA_API_KEY": "b"}), Web)
    for nothing in ({}, {"SERPER_API_KEY": "a"}):
        with pytest.raises(ConfigError, match="RETRIEVAL_URL"):
            backend_of(nothing)
