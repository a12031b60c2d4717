"""A command without a network reaches the model: the real OpenAI client is inside, and our proxy outside."""

from __future__ import annotations

import sys
from pathlib import Path

from areal_agents.client import AsyncClient
from areal_agents.doctor.serving import ObservedProxy, scripted_engine, serving
from areal_agents.doctor.tiny_model import write_tiny_model
from areal_agents.proxy.config import ProxyConfig
from areal_agents.rendering import ChatRenderer
from areal_agents.sandbox.sandbox import Isolation
from areal_agents.store import Store
from tests.sandbox.conftest import spec_for

CLIENT = """
import os, socket
from openai import OpenAI
client = OpenAI()
messages = [{"role": "user", "content": "Hello"}]
for _ in range(2):
    reply = client.chat.completions.create(model="policy", messages=messages)
    messages += [reply.choices[0].message, {"role": "user", "content": "More"}]
pieces = client.chat.completions.create(model="policy", messages=messages, stream=True)
print(len([piece for piece in pieces]) > 1, client.base_url.host)
"""


async def test_the_openai_client_calls_the_proxy_and_nothing_else(
    bubblewrap: Isolation, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path)
    renderer = ChatRenderer.from_folder(model)
    with (
        scripted_engine(model, renderer, context_length=8192) as engine,
        Store.open(tmp_path / "store.db") as store,
    ):
        proxy = ObservedProxy("", store)
        with serving(proxy, engine, renderer, ProxyConfig()):
            async with AsyncClient(proxy.url) as client:
                opened = await client.open_episode({"id": "1", "input": {}})
                sandbox = await bubblewrap.start(spec_for("bubblewrap"))
                variables = {
                    "OPENAI_BASE_URL": sandbox.inner_url(opened.base_url),
                    "OPENAI_API_KEY": opened.api_key,
                }
                program = [sys.executable, "-c", CLIENT]
                done = await sandbox.run(
                    program, timeout_s=60, environment=variables, model_url=opened.base_url
                )
                assert done.stdout.text() == "True 127.0.0.1\n", done.stderr.text()
                assert len((await client.get_episode(opened.id))["turns"]) == 3
                # A command without access to the model cannot call it, even with the key.
                done = await sandbox.run(program, timeout_s=60, environment=variables)
                assert "APIConnectionError" in done.stderr.text()
                assert len((await client.get_episode(opened.id))["turns"]) == 3
