"""Takes the pictures of docs/images from real runs of the search agent: `make screenshots`.

The runs are trained first, two of them with different learning rates, unless they are in the folder already.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from areal_agents.sockets import listen, url_of
from areal_agents.view.runs import Runs
from areal_agents.view.server import make_server

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
RATES = {"search-lr-5e-4": ("16", "5.0e-4"), "search-lr-1e-4": ("12", "1.0e-4")}
SHOWN = "search-lr-5e-4"
WIDE, TALL = {"width": 1280, "height": 800}, {"width": 1280, "height": 1120}
PHONE = {"width": 390, "height": 844}
FEWEST_ELEMENTS = 40  # of a page; one that shows nothing has fewer


def main() -> None:
    """Train what is missing, and write every picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "screenshots", help="the folder of the runs"
    )
    folder = parser.parse_args().runs
    for name, (steps, rate) in RATES.items():
        if not (folder / name / "summary.json").exists():
            _train(folder / name, steps, rate)
    chromium = os.environ.get("CHROME_PATH") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no Chromium: apt-get install chromium, or set CHROME_PATH")
    IMAGES.mkdir(exist_ok=True)
    with _serving(folder) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=WIDE, base_url=url)  # type: ignore[arg-type]
        _take_all(page)
        browser.close()


def _train(folder: Path, steps: str, rate: str) -> None:
    settings = [f"run_dir={folder}", f"trainer.steps={steps}", f"trainer.lr={rate}"]
    command = [sys.executable, "-m", "areal_agents", "train", "examples/search_agent/config.yaml", *settings]
    subprocess.run([*command, "eval.every=4", "eval.episodes=24"], check=True, cwd=ROOT)


@contextmanager
def _serving(folder: Path) -> Iterator[str]:
    server = make_server(Runs(folder), key=None, host="127.0.0.1")
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(timeout=30)


def _take_all(page: Page) -> None:
    run = f"/#/run/{SHOWN}"
    better, worse = _pair(page)
    _take(page, "/", "view-runs", ".charts .u-over", size={"width": 1280, "height": 880})
    _take(page, f"{run}/timeline", "view-timeline", ".timeline canvas", size={"width": 1280, "height": 620})
    _take(page, f"{run}/step/8", "view-step", ".strip", size={"width": 1280, "height": 640})
    _take(
        page,
        f"{run}/episode/{better}?view=tokens&colour=logprob",
        "view-tokens",
        "text=Mismatch above",
        size=TALL,
        hovers=True,
    )
    _take(page, f"{run}/compare?a={worse}&b={better}", "view-compare", ".differs", dark=True)
    _take(page, f"{run}/episode/{better}", "view-phone", ".message", size=PHONE)


def _pair(page: Page) -> tuple[str, str]:
    """Return a rewarded episode, if possible of several versions, and an unrewarded one of its group."""

    def read(path: str) -> Any:
        response = page.request.get(f"/api/runs/{SHOWN}/{path}")
        assert response.ok, response.text()
        return response.json()

    found: list[tuple[bool, str, str]] = []
    for step in range(4, 13):
        for group in read(f"steps/{step}")["groups"]:
            good = [e for e in group["episodes"] if e["score"] == 1 and e["turns"] > 1]
            bad = [e for e in group["episodes"] if e["score"] == 0 and e["turns"] > 1]
            if good and bad:
                best = max(good, key=lambda e: e["version_max"] - e["version_min"])
                found.append((best["version_max"] > best["version_min"], best["id"], bad[0]["id"]))
    _, better, worse = max(found)
    return better, worse


def _take(
    page: Page,
    address: str,
    name: str,
    awaited: str,
    *,
    size: dict[str, int] = WIDE,
    dark: bool = False,
    hovers: bool = False,
) -> None:
    """Write one picture, when what it is about is there."""
    page.set_viewport_size(size)  # type: ignore[arg-type]
    page.emulate_media(color_scheme="dark" if dark else "light")
    page.goto("about:blank")
    page.goto(address)
    page.locator(awaited).first.wait_for()
    page.wait_for_load_state("load")
    page.wait_for_timeout(600)  # charts and canvases are drawn in the frames after
    if hovers:
        _hover_over_a_sampled_token(page)
    elements = page.evaluate("document.querySelectorAll('main *').length")
    assert elements >= FEWEST_ELEMENTS, f"{name} shows nothing"
    page.screenshot(path=IMAGES / f"{name}.png")
    print(f"{name}.png")


def _hover_over_a_sampled_token(page: Page) -> None:
    canvas = page.locator(".tokens canvas")
    canvas.scroll_into_view_if_needed()
    for y in range(60, int(canvas.bounding_box()["height"]), 24):  # type: ignore[index]
        canvas.hover(position={"x": 130, "y": y})
        card = page.locator(".hover")
        if card.count() and "logprob, sampled" in card.inner_text():
            return
    raise AssertionError("no line begins with a sampled token")


if __name__ == "__main__":
    main()
