"""The retrieval server: POST /retrieve searches, POST /access opens a page, GET /health says what there is.

Every refusal is {"error": {"message": …}} with a status of 400, 404, 413, 503 or 504.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from retrieval.batching import Batcher, TooBusy
from retrieval.index import Hit, Index

MOST_QUERIES = 1024  # of one request
MOST_RESULTS = 100  # of one query
LONGEST_QUERY = 10_000  # characters
_BODY_BYTES = 8 * 2**20


def build_app(index: Index, *, timeout_s: float = 30.0) -> Starlette:
    """Return the app that serves an index.

    Args:
        timeout_s: the longest time in seconds that a search may take, the wait for others included.
    """
    batcher = Batcher(index)

    async def retrieve(request: Request) -> Response:
        body = await _object(request, ("queries", "k", "mode"))
        queries, k, mode = body.get("queries"), body.get("k", 3), body.get("mode", "bm25")
        if not isinstance(queries, list) or not 1 <= len(queries) <= MOST_QUERIES:
            raise HTTPException(400, f"queries must be a list of 1 to {MOST_QUERIES} strings")
        if not all(isinstance(query, str) and len(query) <= LONGEST_QUERY for query in queries):
            raise HTTPException(400, f"each query must be a string of at most {LONGEST_QUERY} characters")
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MOST_RESULTS:
            raise HTTPException(400, f"k must be an integer from 1 to {MOST_RESULTS}, got {k!r:.50}")
        if mode not in index.modes:
            raise HTTPException(
                400, f"mode must be one of {', '.join(index.modes)} for this index, got {mode!r:.50}"
            )
        try:
            async with asyncio.timeout(timeout_s):
                found = await batcher.search(queries, k, mode)
        except TooBusy as error:
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from None
        except TimeoutError:
            raise HTTPException(504, f"the search took longer than {timeout_s:g} s") from None
        return _json({"results": [[_result(hit) for hit in hits] for hits in found]})

    async def access(request: Request) -> Response:
        body = await _object(request, ("url", "id"))
        key = body.get("url", body.get("id"))
        if len(body) != 1 or not isinstance(key, str) or not key:
            raise HTTPException(400, "give either url or id, a string that is not empty")
        passages = index.page(key)
        if not passages:
            raise HTTPException(404, f"the corpus has no page {key[:200]}")
        first = passages[0]
        text = "\n\n".join(passage.text for passage in passages)
        return _json({"id": first.id, "url": first.url, "title": first.title, "text": text})

    async def health(request: Request) -> Response:
        return _json({"passages": len(index), "modes": index.modes})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        for mode in index.modes:  # compiles and loads what the first search needs
            await batcher.search(["warm up"], 1, mode)
        yield
        await batcher.close()

    return Starlette(
        routes=[
            Route("/retrieve", retrieve, methods=["POST"]),
            Route("/access", access, methods=["POST"]),
            Route("/health", health, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _refused},
        lifespan=lifespan,
    )


def _result(hit: Hit) -> dict[str, Any]:
    found = hit.passage
    return {"id": found.id, "title": found.title, "url": found.url, "text": found.text, "score": hit.score}


async def _object(request: Request, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the body of a request. Raises HTTPException 400 unless it is an object of these fields."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _BODY_BYTES:
            raise HTTPException(413, f"a request may have at most {_BODY_BYTES} bytes")
        parts.append(part)
    try:
        body = orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body must be a JSON object")
    if unknown := sorted(set(body) - set(names)):
        raise HTTPException(400, f"unknown field {unknown[0][:50]!r}; the fields are {', '.join(names)}")
    return body


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _json({"error": {"message": error.detail}})
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


def _json(data: Any) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
