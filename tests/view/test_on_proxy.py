"""The page at /view of a proxy shows what the proxy records to clients that have a key for it."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest
from scripted_sampler import ScriptedSampler

from areal_agents.proxy.page import Page, link_of_page
from areal_agents.rendering import ChatRenderer
from areal_agents.view.mounted import FACTORY

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))

from proxy_support import MODEL, running_proxy  # noqa: E402


def test_a_proxy_shows_its_episodes_while_it_records_them(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    engine = ScriptedSampler(ChatRenderer.from_folder(MODEL))
    engine.script = lambda call: "Lyon"
    with running_proxy(path, engine, page=Page(FACTORY, str(path), str(MODEL))) as proxy:
        page = proxy.http.get("/view", follow_redirects=True)
        assert page.url.path == "/view/" and 'src="static/main.js"' in page.text
        assert proxy.http.get("/view/static/main.js").status_code == 200
        with proxy.http.stream("GET", "/view/api/runs/store.db/events") as stream:
            changes = (line for line in stream.iter_lines() if line == "event: store")
            next(changes)
            episode = proxy.open_episode(task={"id": "t1", "input": {"q": "Where?"}})
            messages = [{"role": "user", "content": "Where is Lyon?"}]
            proxy.openai(episode).chat.completions.create(model="p", messages=messages)
            next(changes)  # the commit reached the store's file
        (found,) = proxy.http.get("/view/api/runs/store.db/episodes").json()["episodes"]
        assert (found["id"], found["status"], found["turns"]) == (episode["id"], "open", 1)
        shown = proxy.http.get(f"/view/api/runs/store.db/episodes/{episode['id']}").json()
        leaf = shown["turns"][0]["id"]
        (part,) = proxy.http.get(
            f"/view/api/runs/store.db/episodes/{episode['id']}/tokens", params={"leaf": leaf}
        ).json()["parts"]
        assert "Lyon" in "".join(part["texts"][part["prompt_tokens"] :])


def test_a_proxy_with_an_admin_key_shows_nothing_without_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    engine = ScriptedSampler(ChatRenderer.from_folder(MODEL))
    with running_proxy(path, engine, page=Page(FACTORY, str(path), str(MODEL)), admin_key="admin") as proxy:
        assert proxy.http.get("/view/").status_code == 200
        assert proxy.http.get("/view/api/runs").status_code == 401
        given = proxy.http.post("/view/api/session", json={"key": "admin"})
        assert "Path=/view/;" in given.headers["set-cookie"]
        assert proxy.http.get("/view/api/runs").status_code == 200
        with httpx.Client(base_url=proxy.url, timeout=60) as other:
            assert other.get("/view/api/runs", headers={"authorization": "Bearer ep-x"}).status_code == 401


@pytest.mark.parametrize("admin_key", [None, "admin"])
def test_the_key_of_the_page_opens_it_and_nothing_else(tmp_path: Path, admin_key: str | None) -> None:
    path = tmp_path / "store.db"
    engine = ScriptedSampler(ChatRenderer.from_folder(MODEL))
    page = Page(FACTORY, str(path), str(MODEL), key="view-key")
    admin = {"authorization": "Bearer admin"}
    with running_proxy(path, engine, page=page, admin_key=admin_key, headers=admin) as proxy:
        episode = proxy.open_episode(task={"id": "t1", "input": {}})
        agent = {"authorization": f"Bearer {episode['key']}"}
        with httpx.Client(base_url=proxy.url, timeout=60) as browser:
            for headers in ({}, agent):
                assert browser.get("/view/api/runs/store.db/episodes", headers=headers).status_code == 401
            assert link_of_page(proxy.url, page.key) == f"{proxy.url}/view/#key=view-key"
            assert browser.post("/view/api/session", json={"key": "view-key"}).status_code == 200
            assert len(browser.get("/view/api/runs/store.db/episodes").json()["episodes"]) == 1
            if admin_key is not None:
                control = browser.get(
                    f"/episodes/{episode['id']}", headers={"authorization": "Bearer view-key"}
                )
                assert control.status_code == 401
