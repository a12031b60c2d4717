"""A browsing agent on browser-use, with a Chromium of this machine, which reads page.html.

python agent.py "What does the page say?"      (OPENAI_BASE_URL and OPENAI_API_KEY say where)
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ.setdefault("ANONYMIZED_TELEMETRY", "false")
from browser_use import Agent, Browser, ChatOpenAI  # noqa: E402


@contextmanager
def website() -> Iterator[str]:
    """The URL of page.html, on a port of this machine within the with-block."""
    handler = partial(SimpleHTTPRequestHandler, directory=Path(__file__).parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/page.html"
        server.shutdown()


async def browse(task: str, url: str, forced: bool) -> str:
    """Carry one task out on a page, in a browser of its own; what the agent reports."""
    model = ChatOpenAI(
        model="policy",
        base_url=os.environ["OPENAI_BASE_URL"],
        add_schema_to_system_prompt=not forced,
        dont_force_structured_output=not forced,
    )
    browser = Browser(headless=True, chromium_sandbox=False, executable_path=os.environ.get("CHROME_PATH"))
    agent = Agent(
        task=task,
        llm=model,
        browser=browser,
        initial_actions=[{"navigate": {"url": url}}],
        use_vision=False,
        use_judge=False,
    )
    history = await agent.run(max_steps=10)
    return history.final_result() or ""


def run(questions: Sequence[str], *, forced: bool = False) -> str:
    """`browse` with the first question. `forced`, the package's default, samples under a grammar."""
    (task,) = questions
    with website() as url:
        return asyncio.run(browse(task, url, forced))


if __name__ == "__main__":
    print(run(sys.argv[1:]))
