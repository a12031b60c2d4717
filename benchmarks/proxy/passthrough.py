"""A minimal recording proxy: `python -m benchmarks.proxy.passthrough ENGINE_URL`.

It requests ids and logprobs from an engine's own chat endpoint, keeps the response in memory, and answers the
client without them. It has no authentication, no tree, no rendering and no store. It exits when its standard
input is closed.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import Any

import aiohttp
import orjson
import uvloop
from aiohttp import web

_JSON = {"Content-Type": "application/json"}
_KEPT = 64  # number of calls kept: enough to serve as a record, few enough that memory use stays constant


class Passthrough:
    """Forwards chat bodies to one engine and keeps the last records."""

    def __init__(self, engine_url: str, session: aiohttp.ClientSession) -> None:
        self._url = f"{engine_url}/v1/chat/completions"
        self._session = session
        self._records: deque[tuple[Any, ...]] = deque(maxlen=_KEPT)

    async def chat(self, request: web.Request) -> web.Response:
        """POST /v1/chat/completions."""
        body = orjson.loads(await request.read())
        body["logprobs"] = body["return_token_ids"] = True
        async with self._session.post(self._url, data=orjson.dumps(body), headers=_JSON) as answered:
            raw, status = await answered.read(), answered.status
        if status != 200:
            return web.Response(body=raw, status=status, content_type="application/json")
        answer = orjson.loads(raw)
        choice = answer["choices"][0]
        kept = (answer.pop("prompt_token_ids"), choice.pop("token_ids"), choice.pop("logprobs"))
        self._records.append((answer["id"], *kept))
        return web.Response(body=orjson.dumps(answer), content_type="application/json")


async def _serve(engine_url: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        app = web.Application(client_max_size=2**25)
        app.router.add_post("/v1/chat/completions", Passthrough(engine_url, session).chat)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        print(f"serving at http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        try:
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        finally:
            await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
