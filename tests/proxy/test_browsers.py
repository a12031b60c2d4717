"""Requests that a foreign web page can send are refused in the form of their API, and have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_support import RunningProxy, running_proxy
from scripted_sampler import ScriptedSampler

from areal_agents.rendering import ChatRenderer

EVIL = "https://evil.example"
CALL = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def guarded(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("guarded") / "s.db"
    headers = {"authorization": "Bearer admin-secret"}
    with running_proxy(path, ScriptedSampler(renderer), headers=headers, admin_key="admin-secret") as running:
        yield running


@pytest.fixture(scope="module")
def named(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("named") / "s.db"
    more: dict[str, Any] = {
        "allowed_hosts": ("trainer.internal",),
        "public_url": "https://proxy.example:444/x/",
    }
    with running_proxy(path, ScriptedSampler(renderer), **more) as running:
        yield running


def refused(response: httpx.Response, code: str) -> None:
    assert response.status_code == 403, response.text
    assert response.json()["error"]["code"] == code
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("path", ["/episodes", "/health", "/metrics", "/v1/models"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "8.8.8.8"]
)
def test_a_request_with_a_foreign_host_header_is_refused(proxy: RunningProxy, path: str, host: str) -> None:
    refused(proxy.http.get(path, headers={"host": host}), "unknown_host")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:9", "127.9.9.9", "[::1]:80", "a.localhost"]
)
def test_host_names_of_this_machine_are_accepted(proxy: RunningProxy, host: str) -> None:
    assert proxy.http.get("/episodes", headers={"host": host}).status_code == 200


def test_an_admin_key_allows_any_host_and_a_list_allows_its_hosts(
    guarded: RunningProxy, named: RunningProxy
) -> None:
    assert guarded.http.get("/episodes", headers={"host": "trainer.internal"}).status_code == 200
    for host in ("trainer.internal:8000", "proxy.example", "localhost"):
        assert named.http.get("/episodes", headers={"host": host}).status_code == 200
    refused(named.http.get("/episodes", headers={"host": "other.internal"}), "unknown_host")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": EVIL},
        {"origin": EVIL, "content-type": "text/plain"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"origin": "https://127.0.0.1"},
        {"origin": "file://"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_a_cross_origin_request_is_refused_and_has_no_effect(
    proxy: RunningProxy, guarded: RunningProxy, headers: dict[str, str]
) -> None:
    for running in (proxy, guarded):
        episode = running.open_episode()
        path = f"/e/{episode['key']}/v1/chat/completions"
        before = len(running.http.get("/episodes").json()["episodes"])
        refused(running.http.post("/episodes", content=b"{}", headers=headers), "cross_origin")
        refused(running.http.post(path, json=CALL, headers=headers), "cross_origin")
        refused(
            running.http.post(f"/episodes/{episode['id']}/reward", json={"reward": 1}, headers=headers),
            "cross_origin",
        )
        assert len(running.http.get("/episodes").json()["episodes"]) == before
        assert running.tokens(episode)["turns"] == [] and running.tokens(episode)["rewards"] == []


def test_a_refusal_has_the_form_of_its_api(proxy: RunningProxy) -> None:
    response = proxy.http.post("/v1/messages", json={**CALL, "max_tokens": 4}, headers={"origin": EVIL})
    assert response.status_code == 403
    assert response.json()["type"] == "error" and response.json()["error"]["type"] == "permission_error"


def test_a_preflight_request_is_refused(proxy: RunningProxy) -> None:
    asked = {"origin": EVIL, "access-control-request-method": "POST"}
    refused(proxy.http.options("/rewards", headers=asked), "cross_origin")


def test_a_request_of_the_proxys_own_origin_is_accepted(proxy: RunningProxy, named: RunningProxy) -> None:
    own = {"origin": proxy.url, "sec-fetch-site": "same-origin"}
    assert proxy.http.post("/v1/chat/completions", json=CALL, headers=own).status_code == 200
    for origin in ("https://proxy.example:444", "http://trainer.internal:1"):
        assert (
            named.http.post("/v1/chat/completions", json=CALL, headers={"origin": origin}).status_code == 200
        )


def test_base_urls_have_the_proxys_address_and_not_the_host_header(
    proxy: RunningProxy, named: RunningProxy
) -> None:
    opened = proxy.http.post("/episodes", json={}, headers={"host": "localhost:1"}).json()
    assert opened["base_url"].startswith(f"{proxy.url}/e/")
    assert named.open_episode()["base_url"].startswith("https://proxy.example:444/x/e/")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/episodes", "/rewards"])
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_content_type_other_than_json_is_refused(proxy: RunningProxy, path: str, kind: str) -> None:
    response = proxy.http.post(path, content=b"{}", headers={"content-type": kind})
    assert response.status_code == 415
    assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "kind", [None, "application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"]
)
def test_json_is_accepted_with_each_of_its_content_types_or_none(
    proxy: RunningProxy, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    content = b'{"messages": [{"role": "user", "content": "hi"}]}'
    assert proxy.http.post("/v1/chat/completions", content=content, headers=headers).status_code == 200


@pytest.mark.parametrize("name", ["..", ".", "a/../b", "../../episodes", "a//b"])
def test_a_model_name_with_empty_or_dot_segments_is_not_found(proxy: RunningProxy, name: str) -> None:
    request = httpx.Request("GET", proxy.url + "/v1/models/" + name.replace(".", "%2e"))
    response = proxy.http.send(request)
    assert response.status_code == 404, response.text
    assert proxy.http.get("/v1/models/org/name").status_code == 200
