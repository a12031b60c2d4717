"""Invalid requests over plain HTTP get status 400 with the reason, and the server works afterwards."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from inference_support import Missed, again_if_missed, prompt_of

from areal_agents.inference import SGLangEngine, running_engine

PARAMS = {"max_new_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def url(model_folder: Path) -> Iterator[str]:
    # A real server streams cumulatively by default; `running_engine` starts engines with incremental streams.
    with running_engine(
        model_folder, threads=1, slots=2, max_context=2048, incremental_streaming=False
    ) as address:
        yield address


async def post(url: str, path: str, **options: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url + path, **options) as response:
        return response.status, await response.json(content_type=None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input_ids must be a non-empty list"),
        ({"input_ids": []}, "non-empty"),
        ({"input_ids": [[]]}, "non-empty"),
        ({"input_ids": "hello"}, "non-empty list"),
        ({"input_ids": [1, "2"]}, "flat list of integers"),
        ({"input_ids": [1, 2.5]}, "flat list of integers"),
        ({"input_ids": [True, False]}, "flat list of integers"),
        ({"input_ids": [[1], [[2]]]}, "flat list of integers"),
        ({"input_ids": [1, 256]}, "token id 256 is outside the vocabulary of 256"),
        ({"input_ids": [1, 2**70]}, "integers"),
        ({"input_ids": [-1]}, "token id -1 is outside"),
        ({"input_ids": [1] * 2048}, "exceed the context of 2048"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2048}}, "exceed the context of 2048"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "at least 0"),
        ({"input_ids": [1] * 2049, "sampling_params": {"max_new_tokens": 0}}, "exceed the context of 2048"),
        (
            {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 3},
            "exceeds the 2 prompt tokens",
        ),
        ({"input_ids": [1], "top_logprobs_num": 257}, "exceeds the vocabulary of 256"),
        ({"input_ids": [1], "return_flat_raw_top_logprobs": True}, "only together"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature must be in"),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "must be a number"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p must be in"),
        ({"input_ids": [1], "sampling_params": {"top_k": -2}}, "top_k must be"),
        ({"input_ids": [1], "sampling_params": {"stream_interval": 0}}, "stream_interval must be"),
        ({"input_ids": [1], "sampling_params": {"beam_width": 4}}, "unknown sampling parameter 'beam_width'"),
        ({"input_ids": [1], "sampling_params": {"n": 2}}, "n 2 is not supported"),
        ({"input_ids": [1], "sampling_params": {"stop": [""]}}, "stop must be"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids must be"),
        ({"input_ids": [1], "sampling_params": [1]}, "sampling_params must be an object"),
        ({"input_ids": [1], "rid": 7}, "rid must be a string"),
        ({"input_ids": [1], "lora_path": "x"}, "adapter 'x' is not loaded"),
        ({"input_ids": [1], "image_data": "x"}, "unknown field 'image_data'"),
        ({"input_ids": [1], "return_logprob": "yes"}, "true or false"),
        ({"input_ids": [[1], [2]], "stream": True}, "single prompt"),
    ],
)
async def test_an_invalid_body_gets_400_with_the_reason(url: str, body: dict, message: str) -> None:
    status, answer = await post(url, "/generate", json=body)
    assert status == 400
    assert message in answer["error"]["message"]


async def test_a_body_that_is_no_json_object_gets_400(url: str) -> None:
    for raw in (b"{", b"[1, 2]", b"\xff\xfe", b"null"):
        status, answer = await post(url, "/generate", data=raw)
        assert status == 400
        assert "JSON" in answer["error"]["message"]


async def test_an_oversized_body_gets_413_before_it_is_read(url: str) -> None:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n")
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 60)
    writer.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", {"mode": "sideways"}),
        ("/abort_request", {}),
        ("/update_weights_from_disk", {"model_path": 3}),
        ("/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": 3}),
        ("/update_weight_version", {}),
        ("/weights_checker", {"action": "guess"}),
    ],
)
async def test_invalid_control_requests_get_400(url: str, path: str, body: dict) -> None:
    status, answer = await post(url, path, json=body)
    assert status == 400
    assert answer["error"]["message"]


async def test_a_batch_with_one_refused_prompt_is_refused_and_leaves_nothing_running(url: str) -> None:
    params = {"max_new_tokens": 1000, "ignore_eos": True}
    body = {"input_ids": [[5], [6]], "rid": ["twin", "twin"], "sampling_params": params}
    status, answer = await post(url, "/generate", json=body)
    assert status == 400
    assert "'twin' is already running" in answer["error"]["message"]
    async with SGLangEngine(url) as engine:
        await wait_for_load(engine, 0)


async def test_the_server_works_after_invalid_requests(url: str) -> None:
    status, answer = await post(url, "/generate", json={"input_ids": [5, 6], "sampling_params": PARAMS})
    assert status == 200
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])
    async with aiohttp.ClientSession() as session:
        for path in ("/health", "/health_generate", "/get_model_info"):
            async with session.get(url + path) as response:
                assert response.status == 200
        async with session.get(url + "/nowhere") as response:
            assert response.status == 404


@again_if_missed
async def test_a_client_that_hangs_up_aborts_its_generation(url: str) -> None:
    """Both slots run generations whose clients disconnect, and then no request is running."""
    body = json.dumps(
        {
            "input_ids": prompt_of(10).tolist(),
            "sampling_params": {"max_new_tokens": 2000, "temperature": 0, "ignore_eos": True},
        }
    ).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    address = urlsplit(url)
    async with SGLangEngine(url) as engine:
        sockets = [socket.create_connection((address.hostname, address.port)) for _ in range(2)]
        for connection in sockets:
            connection.sendall(head + body)
        await wait_for_load(engine, 2, sockets)
        for connection in sockets:
            connection.close()
        await wait_for_load(engine, 0)


async def test_the_generation_of_a_call_that_times_out_is_aborted(url: str) -> None:
    async with SGLangEngine(url, request_timeout_s=0.05) as engine:
        from areal_agents.core.completion import SamplingParams
        from areal_agents.errors import EngineUnavailable

        with pytest.raises(EngineUnavailable, match=r"did not answer within 0.05 s"):
            await engine.generate("slow", prompt_of(10), SamplingParams(2000, ignore_eos=True))
        await wait_for_load(engine, 0)


async def wait_for_load(engine: SGLangEngine, running: int, clients: Sequence[socket.socket] = ()) -> None:
    """Wait until `running` requests run; raise Missed if a client is answered before that is observed."""
    deadline = time.monotonic() + 60
    while True:
        info = await engine._call("GET", "/get_server_info")
        if info["running"] == running:
            return
        if answered := select.select(clients, [], [], 0)[0]:
            assert b" 200 " in answered[0].recv(100)
            for client in clients:
                client.close()
            raise Missed
        assert time.monotonic() < deadline, f"{info['running']} requests run, expected {running}"
        await asyncio.sleep(0.005)


@again_if_missed
async def test_a_cumulative_stream_grows_and_ends_with_done(url: str) -> None:
    body = {
        "input_ids": prompt_of(20).tolist(),
        "stream": True,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True},
    }
    _, whole = await post(url, "/generate", json={**body, "stream": False})
    async with aiohttp.ClientSession() as session, session.post(url + "/generate", json=body) as response:
        events = [line[6:] for line in (await response.read()).decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    if len(chunks) <= 2:  # on a stalled machine the reader finds the tokens of many steps in one chunk
        raise Missed
    assert lengths == sorted(lengths)
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    for name in ("output_token_logprobs", "weight_versions", "finish_reason"):
        assert chunks[-1]["meta_info"][name] == whole["meta_info"][name]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
        {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"},
    ],
)
async def test_requests_of_web_pages_are_refused(url: str, headers: dict[str, str]) -> None:
    async with SGLangEngine(url) as engine:
        before = (await engine.model_info()).version
        for path, body in (
            ("/pause_generation", {"mode": "retract"}),
            ("/update_weight_version", {"new_version": "99"}),
            ("/abort_request", {"abort_all": True}),
        ):
            text = {**headers, "Content-Type": "text/plain"}
            status, answer = await post(url, path, data=json.dumps(body), headers=text)
            assert status == 403
            assert "may not call this server" in str(answer) or "not a known name" in str(answer)
        assert (await engine.model_info()).version == before
    if "Host" in headers:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{url}/model_info", headers=headers) as read,
        ):
            assert read.status == 403
