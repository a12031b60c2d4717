"""The Responses API on WebSockets, through the real `openai` client."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.resources.responses.responses import ResponsesConnection
from openai.types.responses import Response
from proxy_support import RunningProxy, running_proxy, tool_call
from record_support import until
from scripted_sampler import EngineCall, ScriptedSampler
from websockets.exceptions import ConnectionClosed, InvalidStatus

from areal_agents.proxy.calls import sockets
from areal_agents.rendering import ChatRenderer

MAX_BODY_BYTES = 2**20
THOUGHT = "<think>\nLyon is a city.\n</think>\n\n"
SEARCH: Any = {
    "type": "function",
    "name": "search",
    "description": "Search the corpus.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    "strict": False,
}
RANDOM = ("logprobs", "created_at")
ASK: Any = {"model": "policy", "tools": [SEARCH], "instructions": "Be brief."}


@pytest.fixture(scope="module")
def shared_proxy(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("proxy") / "store.db"
    with running_proxy(path, ScriptedSampler(renderer), max_body_mb=MAX_BODY_BYTES / 2**20) as running:
        yield running


def events_of(connection: ResponsesConnection) -> list[Any]:
    """The events up to the one that ends a response."""
    events: list[Any] = []
    while not events or events[-1].type not in (
        "response.completed", "response.incomplete", "response.failed", "error", "response.steer.failed",
    ):  # fmt: skip
        events.append(connection.recv())
    return events


def ask(connection: ResponsesConnection, **fields: Any) -> Response:
    connection.response.create(**fields)
    last = events_of(connection)[-1]
    assert last.type == "response.completed", last
    return last.response


def error_of(connection: ResponsesConnection, **fields: Any) -> Any:
    connection.response.create(**fields)
    [event] = events_of(connection)
    assert event.type == "error"
    return event


def joined(deltas: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(kind, "".join(text for _, text in pieces)) for kind, pieces in groupby(deltas, lambda d: d[0])]


def converse(send: Any) -> list[Any]:
    """Send a question, then a tool output by previous_response_id, then all items with a new question."""
    first = send(**ASK, input="Where is Lyon?")
    [call] = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "France"}
    second = send(**ASK, input=[output], previous_response_id=first.id)
    items = [item.to_dict() for item in (*first.output, output, *second.output) if not isinstance(item, dict)]
    items.insert(len(first.output), output)
    user = {"role": "user", "content": "Where is Lyon?"}
    third = send(**ASK, input=[user, *items, {"role": "user", "content": "And Nice?"}])
    return [first, second, third]


def recorded(proxy: RunningProxy, episode: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of an episode, with ids replaced by positions and without random fields."""
    turns = proxy.tokens(episode)["turns"]
    text = json.dumps(turns)
    for position, turn in enumerate(turns):
        text = text.replace(turn["id"].removeprefix("chatcmpl-"), f"turn {position}")
    for position, call_id in enumerate(dict.fromkeys(re.findall("call_[0-9a-f]{24}", text))):
        text = text.replace(call_id, f"call {position}")
    return [{name: value for name, value in turn.items() if name not in RANDOM} for turn in json.loads(text)]


def test_a_conversation_is_recorded_as_over_http(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: (
        THOUGHT + tool_call(query="Lyon") if len(proxy.engine.calls) % 3 == 1 else THOUGHT + "In France."
    )
    by_path, by_key, streamed = (proxy.open_episode() for _ in range(3))

    def over_http(**fields: Any) -> Response:
        with proxy.openai(streamed).responses.stream(**fields) as events:
            return events.get_final_response()

    answers = [converse(over_http)]
    for client in (
        proxy.openai(by_path),
        OpenAI(base_url=f"{proxy.url}/v1", api_key=by_key["key"], max_retries=0),
    ):
        with client.responses.connect() as connection:
            answers.append(converse(lambda c=connection, **fields: ask(c, **fields)))
    for over_socket in answers[1:]:
        assert [r.output_text for r in over_socket] == [r.output_text for r in answers[0]]
        assert [r.usage for r in over_socket] == [r.usage for r in answers[0]]
    expected = recorded(proxy, streamed)
    parents = [turn["parent"] for turn in expected]
    assert parents == [None, "chatcmpl-turn 0", None]  # the template drops the thoughts of earlier answers
    assert recorded(proxy, by_path) == expected == recorded(proxy, by_key)


def test_the_events_are_those_of_an_http_stream(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: THOUGHT + "In France."
    episode = proxy.open_episode()
    client = proxy.openai(episode)
    with client.responses.connect() as connection:
        connection.response.create(model="policy", input="Where is Lyon?")
        over_socket = events_of(connection)
        connection.response.create(model="policy", input="Where is Lyon?", stream_id="lane-7")
        named = events_of(connection)
    over_http = list(client.responses.create(model="policy", input="Where is Lyon?", stream=True))
    # The number of pieces of a text depends on the engine.
    kinds = [[kind for kind, _ in groupby(e.type for e in events)] for events in (over_socket, over_http)]
    assert kinds[0] == kinds[1]
    assert [event.sequence_number for event in over_socket] == list(range(len(over_socket)))
    deltas = [
        [(e.type, e.delta) for e in events if e.type.endswith(".delta")]
        for events in (over_socket, over_http)
    ]
    assert joined(deltas[0]) == joined(deltas[1])
    assert {event.stream_id for event in named} == {"lane-7"}
    assert {getattr(event, "stream_id", None) for event in over_socket} == {None}


def test_requests_on_one_connection_are_answered_in_order(proxy: RunningProxy) -> None:
    proxy.engine.delay_s = 0.2
    with proxy.openai(proxy.open_episode()).responses.connect() as connection:
        for number in range(3):
            connection.response.create(model="policy", input=f"question {number}", stream_id=str(number))
        answers = [events_of(connection) for _ in range(3)]
    assert [{event.stream_id for event in events} for events in answers] == [{"0"}, {"1"}, {"2"}]
    assert proxy.engine.most_running == 1


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("[1]", "invalid_json", None),
        ('{"type": "session.update"}', "invalid_value", "type"),
        ('{"type": "response.create"}', "invalid_value", "input"),
        ('{"type": "response.create", "input": "hi", "stream_id": 7}', "invalid_value", "stream_id"),
        ('{"type": "response.create", "input": 7, "generate": false}', "invalid_value", "input"),
        ('{"type": "response.create", "input": "hi", "generate": "no"}', "invalid_value", "generate"),
        (
            '{"type": "response.create", "generate": false, "tools": [{"type": "local_shell"}]}',
            "unsupported_parameter",
            "tools[0]",
        ),
        (
            '{"type": "response.create", "input": "hi", "background": true}',
            "unsupported_parameter",
            "background",
        ),
    ],
)
def test_a_bad_event_is_an_error_and_the_next_is_answered(
    proxy: RunningProxy, message: str, code: str, param: str | None
) -> None:
    with proxy.openai(proxy.open_episode()).responses.connect() as connection:
        connection.send_raw(message)
        [event] = events_of(connection)
        assert (event.type, event.error.code, event.error.param) == ("error", code, param)
        assert event.status >= 400 and event.error.type == "invalid_request_error"
        assert event.error.headers == {"x-should-retry": "false"}
        assert ask(connection, model="policy", input="hi").output_text == "ok"


def test_errors_are_those_of_http(proxy: RunningProxy) -> None:
    with proxy.openai(proxy.open_episode()).responses.connect() as connection:
        error = error_of(connection, model="policy", input="hi", previous_response_id="resp_none")
        assert error.error.code == "previous_response_not_found"
        error = error_of(connection, model="policy", input="long " * 5000)
        assert (error.status, error.error.code) == (400, "context_length_exceeded")
        assert (
            ask(connection, model="gpt-unknown", input="hi").model == "gpt-unknown"
        )  # any name is the policy's


def test_input_that_is_sent_ahead_is_read_with_the_response_that_continues_it(proxy: RunningProxy) -> None:
    proxy.engine.script = lambda call: THOUGHT + "In France."
    whole, ahead = proxy.open_episode(), proxy.open_episode()
    questions: Any = [{"role": "user", "content": f"Where is {city}?"} for city in ("Lyon", "Nice", "Brest")]
    with proxy.openai(whole).responses.connect() as connection:
        first = ask(connection, **ASK, input=questions[:2])
        ask(connection, **ASK, input=questions[2:], previous_response_id=first.id)
    with proxy.openai(ahead).responses.connect() as connection:
        connection.response.create(**ASK, input=questions[:1], generate=False, stream_id="lane-7")
        events = events_of(connection)
        assert [event.type.removeprefix("response.") for event in events] == [
            "created",
            "in_progress",
            "completed",
        ]
        assert {event.stream_id for event in events} == {"lane-7"}
        warm = events[-1].response
        assert (warm.output, warm.usage.total_tokens, warm.status) == ([], 0, "completed")
        assert len(proxy.engine.calls) == 2  # those of the other episode
        first = ask(connection, **ASK, input=questions[1:2], previous_response_id=warm.id)
        second = ask(connection, **ASK, previous_response_id=first.id, input=[], generate=False)
        third = ask(connection, **ASK, previous_response_id=second.id, input=[], generate=False)
        ask(connection, **ASK, input=questions[2:], previous_response_id=third.id)
    assert recorded(proxy, ahead) == recorded(proxy, whole)
    with proxy.openai(ahead).responses.connect() as other:
        error = error_of(other, model="policy", input="hi", previous_response_id=warm.id)
        assert error.error.code == "previous_response_not_found"


def test_input_that_is_sent_ahead_is_kept_up_to_the_size_of_a_body(proxy: RunningProxy) -> None:
    half = "x" * (MAX_BODY_BYTES // 2)
    with proxy.openai(proxy.open_episode()).responses.connect() as connection:
        first, second = (ask(connection, model="policy", input=half, generate=False) for _ in range(2))
        error = error_of(connection, model="policy", input="hi", previous_response_id=first.id)
        assert error.error.code == "previous_response_not_found"
        error = error_of(connection, model="policy", input="hi", previous_response_id=second.id)
        assert error.error.code == "context_length_exceeded"
        # A continuation counts as both inputs, so that many short ones cannot fill the memory.
        third = ask(connection, model="policy", input=[], previous_response_id=second.id, generate=False)
        for gone, code in ((second, "previous_response_not_found"), (third, "context_length_exceeded")):
            error = error_of(connection, model="policy", input="hi", previous_response_id=gone.id)
            assert error.error.code == code


def test_input_that_is_sent_ahead_in_parts_counts_as_a_whole(proxy: RunningProxy) -> None:
    quarter: dict[str, Any] = {"model": "policy", "input": "x" * (MAX_BODY_BYTES // 4), "generate": False}
    with proxy.openai(proxy.open_episode()).responses.connect() as connection:
        first = ask(connection, **quarter)
        second = ask(connection, **quarter, previous_response_id=first.id)
        third = ask(connection, **quarter, previous_response_id=second.id)  # three quarters: alone it fits
        error = error_of(connection, model="policy", input="hi", previous_response_id=second.id)
        assert error.error.code == "previous_response_not_found"
        error = error_of(connection, **quarter, previous_response_id=third.id)
        assert (error.status, error.error.code) == (413, "request_too_large")


def test_steering_is_refused(proxy: RunningProxy) -> None:
    with proxy.openai(proxy.open_episode()).responses.connect() as connection:
        first = ask(connection, model="policy", input="hi")
        connection.response.steer(input="wait", previous_response_id=first.id)
        [event] = events_of(connection)
        assert (event.type, event.error.code) == ("response.steer.failed", "steering_not_supported")
        assert (event.steer.input, event.steer.previous_response_id) == ("wait", first.id)


def test_callers_without_access_cannot_open_a_websocket(
    proxy: RunningProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ended, other = proxy.open_episode(), proxy.open_episode()
    proxy.http.post(f"/episodes/{ended['id']}/finish").raise_for_status()
    refused: list[tuple[Any, dict[str, Any], int, str]] = [
        (proxy.openai(ended), {}, 409, "episode_sealed"),
        (proxy.openai(other, api_key=ended["key"]), {}, 401, "invalid_api_key"),
        (proxy.openai(api_key="ep-unknown-key-of-nothing"), {}, 401, "invalid_api_key"),
        (proxy.openai(other), {"Origin": "https://evil.example"}, 403, "cross_origin"),
        (proxy.openai(base_url=f"{proxy.url}/v2"), {}, 404, "invalid_request"),
    ]
    for client, headers, status, code in refused:
        with pytest.raises(InvalidStatus) as refusal:
            client.responses.connect(extra_headers=headers).enter()
        response = refusal.value.response
        assert (response.status_code, json.loads(response.body)["error"]["code"]) == (status, code)
    headers = {"Origin": proxy.url}
    with proxy.openai(other).responses.connect(extra_headers=headers) as connection:
        assert ask(connection, model="policy", input="hi").output_text == "ok"
    assert not [
        record for record in caplog.records if record.name == "uvicorn.error" and "ep-" in record.getMessage()
    ]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_request_after_the_end_of_its_episode_is_refused(proxy: RunningProxy) -> None:
    episode = proxy.open_episode()
    with proxy.openai(episode).responses.connect() as connection:
        ask(connection, model="policy", input="hi")
        proxy.http.post(f"/episodes/{episode['id']}/finish").raise_for_status()
        error = error_of(connection, model="policy", input="hi", stream_id="a")
        assert (error.status, error.error.code, error.stream_id) == (409, "episode_sealed", "a")


def test_a_message_may_be_as_large_as_a_body_and_a_larger_one_closes_the_connection(
    proxy: RunningProxy,
) -> None:
    with proxy.openai(proxy.open_episode()).responses.connect() as connection:
        head = '{"type": "response.create", "input": "'
        connection.send_raw(head + "x" * (MAX_BODY_BYTES - len(head) - 2) + '"}')
        [event] = events_of(connection)
        assert event.error.code == "context_length_exceeded"
        connection.send_raw("x" * (MAX_BODY_BYTES + 1))
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009
        assert str(MAX_BODY_BYTES) in closed.value.rcvd.reason


def test_too_many_waiting_events_close_the_connection(proxy: RunningProxy) -> None:
    proxy.engine.delay_s = 30.0
    with proxy.openai(proxy.open_episode()).responses.connect() as connection:
        connection.response.create(model="policy", input="hi")
        until(lambda: proxy.engine.calls)
        for _ in range(sockets.MOST_WAITING + 1):
            connection.response.create(model="policy", input="hi")
        with pytest.raises(ConnectionClosed) as closed:
            events_of(connection)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    until(lambda: proxy.engine.cancelled)
    assert len(proxy.engine.calls) == 1


@pytest.mark.parametrize("politely", [True, False])
def test_the_response_of_a_client_that_closes_is_cancelled(proxy: RunningProxy, politely: bool) -> None:
    proxy.engine.delay_s = 30.0
    episode = proxy.open_episode()
    connection = proxy.openai(episode).responses.connect().enter()
    connection.response.create(model="policy", input="hi")
    connection.response.create(model="policy", input="never answered")
    until(lambda: proxy.engine.calls)
    if politely:
        connection.close()
    else:
        connection._connection.socket.close()
        connection._connection.close_socket()
    until(lambda: proxy.engine.cancelled)
    assert proxy.tokens(episode)["turns"] == [] and len(proxy.engine.calls) == 1


def test_an_idle_connection_is_closed(proxy: RunningProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit becomes short while the first response runs and the next event waits."""

    def end_first(call: EngineCall) -> str:
        proxy.engine.hurry.clear()  # the next reply takes the whole delay
        return "ok"

    proxy.engine.script = end_first
    proxy.engine.delay_s = 60.0
    with proxy.openai(proxy.open_episode()).responses.connect() as connection:
        for _ in range(2):
            connection.response.create(model="policy", input="hi")
        until(lambda: proxy.engine.calls)
        monkeypatch.setattr(sockets, "IDLE_S", 0.1)
        proxy.engine.delay_s = 0.3  # a running response is not idle
        proxy.engine.hurry.set()
        for _ in range(2):
            assert events_of(connection)[-1].response.output_text == "ok"
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "no event arrived for 0.1 s")


def test_a_call_without_an_episode_opens_one(proxy: RunningProxy) -> None:
    before = len(proxy.http.get("/episodes").json()["episodes"])
    with proxy.openai().responses.connect() as connection:
        first = ask(connection, model="policy", input="hi")
        ask(connection, model="policy", input="and?", previous_response_id=first.id)
    assert len(proxy.http.get("/episodes").json()["episodes"]) == before + 1


def test_only_get_opens_a_websocket(proxy: RunningProxy) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket"}
    answer = proxy.http.post("/v1/responses", headers=headers)  # a body would not be read
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
