"""Text that must not be stored is replaced before the model reads it, and users can be deleted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError
from proxy_support import SEARCH, RunningProxy, running_proxy, tool_call
from scripted_sampler import ScriptedSampler

from areal_agents.core.messages import Message, ToolCall
from areal_agents.errors import ConfigError, RequestError
from areal_agents.proxy import redaction as redaction_module
from areal_agents.proxy.calls.request import ModelRequest, SamplingWish
from areal_agents.proxy.redaction import Redaction
from areal_agents.rendering import ChatRenderer

SECRET = "jane.doe+shop@mail.example.org"


@pytest.fixture(scope="module")
def redacting(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("redacting") / "store.db"
    rules = {"email": "default", "order": r"ORD-\d{4}"}
    with running_proxy(
        path, ScriptedSampler(renderer), redact=rules, implicit_groups=True, reasoning="keep"
    ) as running:
        running.engine.script = lambda call: "noted"
        yield running


def files_with(proxy: RunningProxy, text: str) -> list[str]:
    return [
        p.name for p in proxy.store.path.parent.iterdir() if p.is_file() and text.encode() in p.read_bytes()
    ]


def test_the_model_reads_what_is_stored(redacting: RunningProxy, renderer: ChatRenderer) -> None:
    """The second turn continues the first on its exact tokens, although the client sends unredacted text."""
    client = redacting.openai(default_headers={"X-Episode-User": "jane"})
    redacting.engine.script = lambda call: tool_call(query="the address")
    messages: list[Any] = [{"role": "user", "content": f"I am {SECRET}, about ORD-1234."}]
    options: Any = {"model": "p", "messages": messages, "tools": [SEARCH]}
    reply = client.chat.completions.create(**options).choices[0].message
    (call,) = reply.tool_calls or ()
    found = {"role": "tool", "tool_call_id": call.id, "content": f"Write to {SECRET}!"}
    messages += [reply.model_dump(exclude_none=True), found]
    redacting.engine.script = lambda call: "noted"
    client.chat.completions.create(**options)
    (episode,) = redacting.http.get("/episodes", params={"user": "jane"}).json()["episodes"]
    first, second = redacting.tokens(episode)["turns"]
    assert first["new_messages"][0]["content"] == "I am [email], about [order]."
    assert second["parent"] == first["id"], second["forked_from"]
    sent = [call.input_ids.tolist() for call in redacting.engine.calls[-2:]]
    assert [first["prompt_ids"], second["prompt_ids"]] == sent
    assert "Write to [email]!" in renderer.tokenizer.decode(sent[1])
    assert not files_with(redacting, SECRET) and not files_with(redacting, "ORD-1234")


def test_raw_prompts_are_redacted_and_token_ids_refused(redacting: RunningProxy) -> None:
    client = redacting.openai()
    client.completions.create(model="p", prompt=f"{SECRET} wrote:", max_tokens=4)
    assert not files_with(redacting, SECRET)
    with pytest.raises(BadRequestError, match="token ids cannot be redacted"):
        client.completions.create(model="p", prompt=[5, 6, 7], max_tokens=4)


def test_nothing_of_a_deleted_user_remains(redacting: RunningProxy) -> None:
    http, started = redacting.http, "My word is xylograph."
    for user in ("bob", "alice"):
        client = redacting.openai(default_headers={"X-Episode-User": user})
        for opening in (started, "And another."):
            client.chat.completions.create(model="p", messages=[{"role": "user", "content": opening}])
    found = http.get("/episodes", params={"user": "bob"}).json()["episodes"]
    assert len(found) == 2, "alice began with the same words, in a conversation of her own"
    rewarded = found[0]["id"]
    assert http.post(f"/episodes/{rewarded}/reward", json={"reward": 1}).status_code == 200
    for episode in found:
        assert http.delete(f"/episodes/{episode['id']}").json() == {"id": episode["id"], "deleted": True}
    assert http.get("/episodes", params={"user": "bob"}).json()["episodes"] == []
    assert http.delete(f"/episodes/{rewarded}").status_code == 404
    assert not files_with(redacting, "bob")
    assert files_with(redacting, "xylograph"), "alice's are still there"
    # The conversation of a deleted episode continues in a new one.
    client = redacting.openai(default_headers={"X-Episode-User": "bob"})
    client.chat.completions.create(model="p", messages=[{"role": "user", "content": started}])
    assert len(http.get("/episodes", params={"user": "bob"}).json()["episodes"]) == 1


def request_of(*messages: Message) -> ModelRequest:
    return ModelRequest(messages, (), "", SamplingWish())


def test_every_text_of_a_message_is_redacted() -> None:
    redaction = Redaction({"email": "default", "phone": "default", "card": "default", "ip": "default"})
    call = ToolCall("c", "mail", f'{{"to": "{SECRET}"}}')
    found = redaction.redacted(
        request_of(
            Message("user", "+49 (30) 1234-5678, 4111 1111 1111 1111, 10.0.0.255"),
            Message("assistant", "", reasoning=f"it is {SECRET}", tool_calls=(call,)),
            Message("tool", f"sent to {SECRET}.", tool_call_id="c"),
            Message("system", "Version 1.2.3 of 2026-11-26, 15 + 4 = 19, a@b."),
        )
    ).messages
    assert found[0].content == "[phone], [card], [ip]"
    assert (found[1].reasoning, found[1].tool_calls[0].arguments) == ("it is [email]", '{"to": "[email]"}')
    assert found[2].content == "sent to [email]."
    assert found[3].content == "Version 1.2.3 of 2026-11-26, 15 + 4 = 19, a@b."


def test_arguments_of_calls_are_redacted_by_value_and_stay_json() -> None:
    """In JSON a line end is written as \\ and n, and there is no word boundary after the n."""
    given = {"body": "Hi\nbob@x.de", "to": ["ann@x.de"], "n": 3, "ok": True, "deep": {"a": None}}
    message = Message("assistant", "", tool_calls=(ToolCall("c", "mail", json.dumps(given)),))
    (redacted,) = Redaction({"email": "default"}).redacted(request_of(message)).messages
    assert json.loads(redacted.tool_calls[0].arguments) == {
        **given, "body": "Hi\n[email]", "to": ["[email]"],
    }  # fmt: skip
    broken = Message("assistant", "", tool_calls=(ToolCall("c", "mail", '{"to": "ann@x.de"'),))
    (redacted,) = Redaction({"email": "default"}).redacted(request_of(broken)).messages
    assert redacted.tool_calls[0].arguments == '{"to": "[email]"'


def test_the_known_patterns_are_fast_on_hostile_text_and_a_slow_one_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redaction_module, "_LONGEST_S", 60.0)  # the texts are limited in processor time
    known = Redaction(dict.fromkeys(("email", "phone", "card", "ip"), "default"))
    began = time.process_time()
    for text in ("a" * 10**6, "a." * 500_000, "+1 " * 300_000, "1234 " * 200_000, "1." * 500_000):
        known.redacted(request_of(Message("user", text)))
    assert time.process_time() - began < 5
    monkeypatch.setattr(redaction_module, "_LONGEST_S", 0.1)
    with pytest.raises(RequestError, match=r"could not be redacted within 0\.1 s"):
        Redaction({"bad": "(a+)+b"}).redacted(request_of(Message("user", "a" * 5000)))


@pytest.mark.parametrize(
    ("rules", "why"), [({"x": "("}, "not a valid pattern"), ({"name": "default"}, "no default")]
)
def test_wrong_rules_are_refused(rules: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Redaction(rules)


def test_deleting_needs_the_admin_key(renderer: ChatRenderer, tmp_path: Path) -> None:
    with running_proxy(
        tmp_path / "store.db", ScriptedSampler(renderer), admin_key="admin", project_keys=("users",)
    ) as proxy:
        headers = {"Authorization": "Bearer users"}
        answer = httpx.delete(f"{proxy.url}/episodes/x", headers=headers, timeout=60)
        assert answer.status_code in (401, 403)
