"""The scripted engine follows SGLang's protocol, as our client and a plain HTTP client see it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from polling import until
from tokenizers import Tokenizer

from areal_agents.core.completion import SamplingParams, TokenChunk, as_token_ids
from areal_agents.errors import ConfigError, EngineRejected, EngineUnavailable
from areal_agents.inference import SGLangEngine
from areal_agents.inference.sglang.client import RID_END
from areal_agents.testing import (
    ScriptedApp,
    ScriptedReply,
    by_prompt,
    filler,
    repeat,
    running,
    running_process,
)
from areal_agents.testing.session import ScriptedGeneration

MODEL = Path(__file__).parents[2] / "examples" / "search_agent" / "model"
SAMPLING = SamplingParams(64)


class Server:
    """A running scripted engine that accepts requests over plain HTTP."""

    def __init__(self, app: ScriptedApp, url: str) -> None:
        self.app = app
        self.url = url
        self.tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self.stop_id = self.tokenizer.token_to_id("<|im_end|>")

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def generate(self, prompt: str = "hello", **body: Any) -> dict[str, Any]:
        response = self.post("/generate", **{"input_ids": self.ids(prompt), "return_logprob": True} | body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, prompt: str = "hello", **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed response, without the final [DONE], which is checked."""
        body = {"input_ids": self.ids(prompt), "return_logprob": True, "stream": True} | body
        with httpx.stream("POST", self.url + "/generate", json=body, timeout=60) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    app = ScriptedApp.from_folder(MODEL, lambda call: "ok", context_length=4096)
    with running(app) as url:
        yield Server(app, url)


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The module's server, which replies "ok" and has no recorded requests."""
    shared_server.app.script = lambda call: "ok"
    shared_server.app.exchanges.clear()
    shared_server.app.aborted.clear()
    return shared_server


def test_an_answer_has_ids_logprobs_versions_and_the_stop_token(server: Server) -> None:
    answer = server.generate(rid="r1")
    meta = answer["meta_info"]
    ids = [*server.ids("ok"), server.stop_id]
    assert answer["output_ids"] == ids
    assert answer["text"] == "ok"
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "stop", "matched": server.stop_id}
    assert [triple[1] for triple in meta["output_token_logprobs"]] == ids
    assert all(-4 < triple[0] <= 0 for triple in meta["output_token_logprobs"])
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": len(ids)}]
    [exchange] = server.app.exchanges
    assert exchange.token_ids == tuple(ids)
    assert exchange.input_ids.tolist() == server.ids("hello")


async def test_our_client_reads_a_response(server: Server) -> None:
    async with SGLangEngine(server.url) as engine:
        info = await engine.model_info()
        assert (info.model_path, info.version, info.max_context) == (str(MODEL), 0, 4096)
        await engine.health()
        completion = await engine.generate("r1", as_token_ids(server.ids("hello")), SAMPLING)
        [exchange] = server.app.exchanges
        assert completion.token_ids.tolist() == list(exchange.token_ids)
        assert completion.logprobs.tolist() == list(exchange.logprobs)
        assert completion.finish_reason == "stop"
        assert exchange.body["sampling_params"]["max_new_tokens"] == 64


def test_the_same_prompt_gets_the_same_logprobs_and_another_prompt_gets_others(server: Server) -> None:
    first, again, other = (server.generate(text)["meta_info"] for text in ("a b", "a b", "a c"))
    assert first["output_token_logprobs"] == again["output_token_logprobs"]
    assert first["output_token_logprobs"] != other["output_token_logprobs"]


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_is_the_whole_answer_in_pieces(server: Server, incremental: bool) -> None:
    text = "the answer is 42, said the café"
    app = ScriptedApp.from_folder(
        MODEL, repeat([ScriptedReply(text, chunk_tokens=3)]), incremental=incremental, context_length=4096
    )
    with running(app) as url:
        streaming = Server(app, url)
        whole = streaming.generate()
        events = streaming.stream()
    pieces = [event["output_ids"] for event in events]
    triples = [event["meta_info"]["output_token_logprobs"] for event in events]
    if incremental:
        assert sum(pieces, []) == whole["output_ids"]
        assert sum(triples, []) == whole["meta_info"]["output_token_logprobs"]
        assert {len(piece) for piece in pieces[:-1]} == {3}
    else:
        assert pieces == [whole["output_ids"][: len(piece)] for piece in pieces]
        assert [len(piece) for piece in pieces[:-1]] == list(range(3, 3 * len(pieces), 3))
        assert events[-1]["text"] == text
        assert triples[-1] == whole["meta_info"]["output_token_logprobs"]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert all("weight_versions" not in event["meta_info"] for event in events[:-1])
    for key in ("finish_reason", "weight_versions", "completion_tokens"):
        assert events[-1]["meta_info"][key] == whole["meta_info"][key]
    assert app.exchanges[0].token_ids == app.exchanges[1].token_ids


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 4])
async def test_our_client_reads_a_stream(incremental: bool, chunk_tokens: int) -> None:
    script = repeat([ScriptedReply("one two three four five", chunk_tokens=chunk_tokens)])
    app = ScriptedApp.from_folder(MODEL, script, incremental=incremental)
    params = SamplingParams(64, top_logprobs=2)
    chunks: list[TokenChunk] = []
    with running(app) as url:
        async with SGLangEngine(url) as engine:
            whole = await engine.generate("whole", as_token_ids([5, 6]), params)
            streamed = await engine.generate("streamed", as_token_ids([5, 6]), params, chunks.append)
    assert [i for chunk in chunks for i in chunk.token_ids] == streamed.token_ids.tolist()
    assert streamed.token_ids.tolist() == whole.token_ids.tolist() == list(app.exchanges[0].token_ids)
    assert streamed.logprobs.tolist() == whole.logprobs.tolist()
    assert streamed.versions.tolist() == whole.versions.tolist()
    assert streamed.top_logprobs == whole.top_logprobs
    assert [best[0][0] for best in whole.top_logprobs] == whole.token_ids.tolist()


def test_the_limits_of_a_request_end_a_reply(server: Server) -> None:
    server.app.script = lambda call: "one two three four"
    ids = [*server.ids("one two three four"), server.stop_id]

    cut = server.generate(sampling_params={"max_new_tokens": 2})
    assert cut["output_ids"] == ids[:2]
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 2}

    exact = server.generate(sampling_params={"max_new_tokens": len(ids)})
    assert exact["meta_info"]["finish_reason"]["type"] == "stop"

    stopped = server.generate(sampling_params={"stop_token_ids": [ids[1]]})
    assert stopped["output_ids"] == ids[:2]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[1]}

    worded = server.generate(sampling_params={"stop": ["never", "three"]})
    assert worded["text"] == "one two "
    assert worded["meta_info"]["finish_reason"] == {"type": "stop", "matched": "three"}
    assert server.tokenizer.decode(worded["output_ids"]) == "one two three"

    on = server.generate(sampling_params={"stop_token_ids": [ids[1]], "ignore_eos": True})
    assert on["output_ids"] == ids


def test_the_script_can_cut_off_replies(server: Server) -> None:
    server.app.script = repeat(
        [ScriptedReply("half a", finish="length"), ScriptedReply("ha", finish="abort"), ScriptedReply("end")]
    )
    length, abort, end = (server.generate() for _ in range(3))
    assert length["output_ids"] == server.ids("half a")
    assert length["meta_info"]["finish_reason"]["type"] == "length"
    assert abort["meta_info"]["finish_reason"]["type"] == "abort"
    assert end["output_ids"][-1] == server.stop_id


def test_top_logprobs_have_the_sampled_token_first(server: Server) -> None:
    meta = server.generate(top_logprobs_num=3)["meta_info"]
    for sampled, best in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert best[0] == sampled
        assert [entry[0] for entry in best] == sorted((entry[0] for entry in best), reverse=True)
        assert len({entry[1] for entry in best}) == 3


def test_scripts_receive_the_prompt(server: Server) -> None:
    prompt = "<|im_start|>user\nweather<|im_end|>\n<|im_start|>user\nnews<|im_end|>\n<|im_start|>assistant\n"
    seen = []
    rules = by_prompt([("weather", "sunny"), ("news", ScriptedReply("none"))])

    def script(call: Any) -> ScriptedReply | str:
        seen.append(call)
        return rules(call)

    server.app.script = script
    assert (
        server.generate(prompt, sampling_params={"json_schema": "{}"}, field_of_tomorrow=1)["text"] == "none"
    )
    assert seen[0].prompt_text == prompt
    assert seen[0].last_text == "\n<|im_start|>user\nnews<|im_end|>\n<|im_start|>assistant\n"
    assert seen[0].body["sampling_params"] == {"json_schema": "{}"}
    refused = server.post("/generate", input_ids=server.ids("sport"))
    assert refused.status_code == 400
    assert "sport" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input_ids must be a list"),
        ({"input_ids": []}, "at least one"),
        ({"input_ids": [[1], [2]]}, "flat list"),
        ({"input_ids": [1, "2"]}, "flat list"),
        ({"input_ids": [1, 10**9]}, "token id 1000000000 is outside the vocabulary"),
        ({"input_ids": [-1]}, "token id -1 is outside"),
        ({"input_ids": [1] * 4000}, "exceed the model's context length of 4096"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"n": 2}}, "n must be 1"),
        ({"input_ids": [1], "sampling_params": {"stop": [1]}}, "stop must be"),
        ({"input_ids": [1], "top_logprobs_num": "5"}, "top_logprobs_num"),
        ({"input_ids": [1], "sampling_params": {"stream_interval": 0}}, "stream_interval"),
    ],
)
def test_requests_that_a_real_server_refuses_or_crashes_on_are_refused(
    server: Server, body: dict[str, Any], message: str
) -> None:
    for stream in (False, True):
        response = server.post("/generate", **body, stream=stream)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


async def test_errors_of_the_script_are_errors_of_the_engine(server: Server) -> None:
    server.app.script = repeat(
        [ScriptedReply(error="overloaded", error_status=503), ScriptedReply(error="bad", error_status=400)]
    )
    async with SGLangEngine(server.url) as engine:
        with pytest.raises(EngineUnavailable, match="503: overloaded"):
            await engine.generate("r1", as_token_ids([5]), SAMPLING)
        with pytest.raises(EngineRejected, match="bad"):
            await engine.generate("r2", as_token_ids([5]), SAMPLING)


async def until_running(engine: SGLangEngine, count: int) -> None:
    async with asyncio.timeout(60):
        while (await engine._call("GET", "/server_info"))["running"] != count:
            await asyncio.sleep(0.005)


SLOW = ScriptedReply("one two three four five six seven eight nine ten", delay_s=0.005, chunk_delay_s=60.0)


async def test_an_aborted_request_returns_what_was_sampled(server: Server) -> None:
    server.app.script = lambda call: SLOW
    async with SGLangEngine(server.url) as engine:
        call = asyncio.create_task(engine.generate("long", as_token_ids([5]), SAMPLING))
        await until_running(engine, 1)
        with pytest.raises(EngineRejected, match="already running"):
            await engine.generate("long", as_token_ids([5]), SAMPLING)
        await engine.abort("long")
        completion = await call
        assert completion.finish_reason == "abort"
        assert completion.token_ids.tolist() == server.ids(SLOW.text)[: len(completion)]
        await engine.abort("nobody")
        assert server.app.aborted == ["long" + RID_END, "nobody" + RID_END]


async def test_a_client_that_disconnects_ends_its_generation(server: Server) -> None:
    server.app.script = lambda call: SLOW
    async with SGLangEngine(server.url) as engine, httpx.AsyncClient(base_url=server.url) as client:
        for stream in (False, True):
            call = asyncio.create_task(client.post("/generate", json={"input_ids": [5], "stream": stream}))
            await until_running(engine, 1)
            call.cancel()
            await until_running(engine, 0)
    assert [exchange.finish["type"] for exchange in server.app.exchanges] == ["abort", "abort"]


async def test_tokens_keep_the_version_under_which_they_arrived(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delay before the second chunk ends once the engine is paused."""
    paused = threading.Event()
    interrupted = ScriptedGeneration._interrupted

    async def interrupted_once_paused(generation: ScriptedGeneration, delay_s: float) -> bool:
        if delay_s:
            await until(paused.is_set)
        return await interrupted(generation, 0.0)

    monkeypatch.setattr(ScriptedGeneration, "_interrupted", interrupted_once_paused)
    slow = ScriptedReply("one two three four five", chunk_delay_s=60.0, chunk_tokens=9)
    server.app.script = lambda call: slow if call.input_ids[0] == 5 else "ok"
    async with SGLangEngine(server.url) as engine:
        begun = asyncio.Event()
        call = asyncio.create_task(
            engine.generate("r", as_token_ids([5]), SAMPLING, lambda chunk: begun.set())
        )
        await asyncio.wait_for(begun.wait(), 60)
        await engine.pause("in_place")
        paused.set()
        held = asyncio.create_task(engine.generate("h", as_token_ids([6]), SAMPLING))
        await until_running(engine, 2)
        await engine.update_weights_from_disk(str(MODEL), 7)
        assert not call.done() and not held.done()
        await engine.resume()
        assert (await call).versions.tolist() == [0] * 9 + [7] * 9
        assert set((await held).versions.tolist()) == {7}
        assert (await engine.model_info()).version == 7
        await engine.update_weights_from_disk(str(MODEL), 0)


async def test_a_pause_that_aborts_ends_what_runs_and_holds_what_comes(server: Server) -> None:
    server.app.script = lambda call: SLOW if call.index % 2 == first % 2 else "ok"
    told = await asyncio.to_thread(httpx.get, f"{server.url}/server_info", timeout=60)
    first = told.json()["calls"]
    async with SGLangEngine(server.url) as engine:
        call = asyncio.create_task(engine.generate("r", as_token_ids([5]), SAMPLING))
        await until_running(engine, 1)
        await engine.pause("abort")
        assert (await call).finish_reason == "abort"
        held = asyncio.create_task(engine.generate("h", as_token_ids([5]), SAMPLING))
        await until_running(engine, 1)
        await engine.abort("h")  # a pause does not delay an abort
        assert (await held).finish_reason == "abort"
        await engine.resume()


def test_the_process_answers_with_filler_and_ends_with_its_parent() -> None:
    with running_process(MODEL, ["--reply-tokens", "25"]) as url:
        answer = httpx.post(
            f"{url}/generate", json={"input_ids": [5], "return_logprob": True}, timeout=60
        ).json()
        assert len(answer["output_ids"]) == 25
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        assert len(answer["meta_info"]["output_token_logprobs"]) == 25
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")

    command = [sys.executable, "-m", "areal_agents.testing", "--model", str(MODEL)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline().startswith("scripted engine at http://127.0.0.1:")
        process.stdin.close()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_invalid_scripts_and_replies_are_refused(tmp_path: Path, server: Server) -> None:
    with pytest.raises(ConfigError, match="not a model folder"):
        ScriptedApp.from_folder(tmp_path, lambda call: "ok")
    with pytest.raises(ValueError, match="at least one reply"):
        repeat([])
    with pytest.raises(ValueError, match="n_tokens must be at least 1"):
        filler(0, server.tokenizer, stop_token_id=2)
    for wrong in (
        {"finish": "eos"},
        {"text": "a", "token_ids": (1,)},
        {"chunk_tokens": 0},
        {"delay_s": -1.0},
    ):
        with pytest.raises(ValueError):
            ScriptedReply(**wrong)
