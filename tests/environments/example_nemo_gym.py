"""A counter that implements the protocol of NeMo Gym's resources servers, without the package.

The package has a real server that behaves the same (`real_nemo_gym.py`). If `initial_count` of a row is a key
of `LIES`, or "silence", /verify gives that invalid response, or none for a minute.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

from fastapi import Body, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

COUNTS: dict[str, int] = {}
LIES = {
    "no json": lambda: PlainTextResponse("fine"),
    "list": lambda: PlainTextResponse("[]"),
    "nan": lambda: PlainTextResponse('{"reward": NaN}'),
    "nothing": lambda: PlainTextResponse("{}"),
    "error": lambda: PlainTextResponse("no such answer", status_code=500),
    "endless": lambda: StreamingResponse(endless()),
}
app = FastAPI()


async def endless() -> Any:
    for _ in range(64):
        yield b"x" * (1 << 20)


@app.post("/seed_session")
async def seed_session(response: Response, row: dict = Body()) -> dict[str, Any]:  # noqa: B008
    assert row["responses_create_params"]["input"]
    session = uuid4().hex
    COUNTS[session] = row["initial_count"]
    response.set_cookie("session", session)
    return {}


@app.post("/increment_counter")
async def increment_counter(request: Request, body: dict = Body()) -> Any:  # noqa: B008
    if type(body.get("count")) is not int:
        return PlainTextResponse("count must be an integer", status_code=422)
    COUNTS[request.cookies["session"]] += body["count"]
    return {"success": True}


@app.post("/get_counter_value")
async def get_counter_value(request: Request) -> dict[str, int]:
    return {"count": COUNTS[request.cookies["session"]]}


@app.post("/verify")
async def verify(request: Request, row: dict = Body()) -> Any:  # noqa: B008
    said = COUNTS[request.cookies["session"]]
    if said == "silence":
        await asyncio.sleep(60)
    if said in LIES:
        return LIES[said]()  # type: ignore[index]
    assert row["response"]["output"][-1]["type"] == "message"
    return {**row, "reward": float(row["expected_count"] == said)}
