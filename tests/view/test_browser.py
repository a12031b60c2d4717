"""The page in a real Chromium: clicks, keys, the output of models, a phone, dark mode and an access key."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from view_support import ATTACK, make_run, serving

from areal_agents.launch.run_folder import RunFolder
from benchmarks.view.generate import make_run as make_large_run

CHROMIUM = os.environ.get("CHROME_PATH") or next(
    filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser", "chrome"))), None
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no Chromium: apt-get install chromium, or set CHROME_PATH"
    ),
]
RUN = "#/run/run"
TIMEOUT_S = 60
_IMAGES = "img[onerror], main script, iframe, object, embed"  # elements that the attack would create


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("runs")
    make_run(root)
    make_run(root, name="second")
    with serving(root) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="make test-browser installs playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """A page of 1280 × 900 pixels; an error, a violation of its policy or a call of another server fails the
    test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, base_url=url)
    page, problems = context.new_page(), []
    page.set_default_timeout(TIMEOUT_S * 1000)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if _is_problem(message) else None)
    page.on(
        "request", lambda request: problems.append(request.url) if not request.url.startswith(url) else None
    )
    yield page
    context.close()
    assert problems == []


def until(page: Any, condition: str) -> None:
    """Wait until an expression is true; the page's policy forbids the eval of playwright's own method."""
    deadline = time.monotonic() + TIMEOUT_S
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S} s: {condition}"
        page.wait_for_timeout(30)


def rendered(page: Any) -> None:
    """Wait until the page shows the effect of the last input, which it renders before its next frame."""
    page.evaluate(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
    )


def _is_problem(message: Any) -> bool:
    """Whether a message on the console is an error other than a request that the page itself explains."""
    return message.type == "error" and "status of 404" not in message.text


def pixels(page: Any, selector: str) -> set[tuple[int, int, int]]:
    """The colours on a canvas, rounded to steps of 16, without transparent pixels."""
    found = page.evaluate(
        """selector => { const c = document.querySelector(selector);
        const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data; const seen = new Set();
        for (let i = 0; i < d.length; i += 4)
          if (d[i + 3] > 40) seen.add([d[i] >> 4, d[i + 1] >> 4, d[i + 2] >> 4].join());
        return [...seen]; }""",
        selector,
    )
    return {tuple(map(int, colour.split(","))) for colour in found}


def test_links_lead_from_a_run_to_a_step_a_group_an_episode_and_a_token(page: Any) -> None:
    page.goto("/")
    page.get_by_role("link", name="run", exact=True).click()
    chart = page.get_by_label("Reward", exact=True)
    plot = chart.locator(".u-over")
    box = plot.bounding_box()
    plot.click(position={"x": box["width"] - 2, "y": 8})  # the last point, which is the highest
    page.wait_for_url("**/#/run/run/step/3")
    page.get_by_role("link", name="Where is nice?").click()
    page.wait_for_url("**/group/nice%403")
    page.get_by_role("link", name="1", exact=True).click()
    page.wait_for_url("**/episode/nice-3-1")
    page.wait_for_selector(".message")
    assert page.locator(".message .role").all_inner_texts() == [
        "system",
        "user",
        "assistant",
        "tool\nsearch",
        "assistant",
    ]
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.locator(".tokens canvas").wait_for()
    until(page, "document.querySelectorAll('.facts dd').length > 8")
    page.locator(".tokens .scroll").focus()
    for number in range(1, 4):
        page.keyboard.press("ArrowRight")
        page.wait_for_url(f"**token={number}*")
        rendered(page)
    card = page.locator(".hover")
    assert "id" in card.inner_text() and "mask" in card.inner_text()
    assert "token=3" in page.url and "view=tokens" in page.url


def test_a_token_shows_its_numbers_on_hover_and_has_a_link(page: Any) -> None:
    page.goto(f"/{RUN}/episode/nice-3-1?view=tokens&colour=version")
    until(page, "document.querySelector('.tokens canvas')?.width > 0")
    canvas = page.locator(".tokens canvas")
    found = {}
    height = int(canvas.bounding_box()["height"])
    for y in range(12, height, 24):  # every line; the sampled tokens follow the prompt's
        canvas.hover(position={"x": 20, "y": y})
        rendered(page)  # before that, the card is that of the token of the line above
        text = page.locator(".hover").inner_text() if page.locator(".hover").count() else ""
        if "logprob, sampled" in text:
            found[y] = text
    assert found and all("version" in text and "staleness" in text for text in found.values())
    canvas.click(position={"x": 20, "y": next(iter(found))})
    page.wait_for_url("**token=*")
    again = page.url
    page.goto("about:blank")
    page.goto(again)
    page.wait_for_selector(".hover")
    assert "logprob, sampled" in page.locator(".hover").inner_text()


def test_the_colours_of_tokens_are_those_of_the_legend(page: Any) -> None:
    page.goto(f"/{RUN}/episode/nice-3-1?view=tokens&colour=version")
    until(page, "document.querySelector('.tokens canvas')?.width > 0")
    page.wait_for_selector("text=version 1")
    by_version = pixels(page, ".tokens canvas")
    page.get_by_role("button", name="Mask").click()
    page.wait_for_selector(".legend .swatch")
    assert page.locator(".legend .item").first.inner_text() == "trained"
    by_mask = pixels(page, ".tokens canvas")
    assert by_version - by_mask and by_mask - by_version
    assert page.get_by_role("button", name="Advantage").is_disabled()  # this run has no such record


def test_a_token_shows_what_training_did_with_it(page: Any) -> None:
    page.goto(f"/{RUN}/episode/lyon-1-1?view=tokens&colour=advantage")
    page.wait_for_selector("text=advantage −2")
    page.wait_for_selector("text=Mismatch above 0.1")
    first = page.locator(".tokens .scroll")
    first.focus()
    card = page.locator(".hover")
    for _ in range(40):
        page.keyboard.press("ArrowRight")
        rendered(page)
        if "ratio" in card.inner_text():
            break
    text = card.inner_text()
    page.get_by_role("button", name="Explain").wait_for()
    assert "clipped high" in text and "1.5000" in text and "step 1, on version 0" in text


def test_nothing_that_a_model_wrote_is_interpreted(page: Any) -> None:
    for address in (
        "/episode/evil",
        "/episode/evil?view=tokens",
        "/episodes",
        "/episodes?status=failed",
        "/config",
        "",
    ):
        page.goto(f"/{RUN}{address}")
        until(page, "document.querySelector('main h1, main table') !== null")
        assert page.evaluate("window.attacked") is None
        assert page.locator(_IMAGES).count() == 0
    page.goto(f"/{RUN}/episode/evil")
    page.wait_for_selector(".message")
    text = page.locator("main").inner_text()
    assert text.count(ATTACK) >= 5  # the task, the error, the prompt, the reply, the tool and its arguments
    assert page.locator('a[href^="javascript:"]').count() == 0


def test_hostile_addresses_are_shown_as_text(page: Any) -> None:
    page.goto("/#/run/" + "%3Cimg%20src%3Dx%20onerror%3D%22window.attacked%3D1%22%3E")
    page.wait_for_selector(".problem")
    assert "<img src=x" in page.locator(".problem").inner_text()
    assert page.evaluate("window.attacked") is None and page.locator(_IMAGES).count() == 0


def test_curves_of_runs_share_a_chart_and_the_choice_is_in_the_address(page: Any) -> None:
    page.goto("/")
    reading = page.get_by_label("Reward", exact=True).locator(".read")
    reading.locator(".dot").nth(1).wait_for()
    assert reading.locator("span[title]").count() == 2
    page.get_by_label("Show the curves of second").uncheck()
    page.wait_for_url("**runs=run*")
    until(page, "document.querySelectorAll('[aria-label=Reward] .read .dot').length === 1")
    page.get_by_label("Add a metric").select_option("step_s")
    page.get_by_label("Seconds per step", exact=True).wait_for()
    page.get_by_role("button", name="Time").click()
    page.wait_for_url("**x=time*")


def test_a_point_of_the_held_out_curve_opens_its_evaluation(page: Any) -> None:
    page.goto(f"/{RUN}")
    plot = page.get_by_label("Held-out reward").locator(".u-over")
    box = plot.bounding_box()
    plot.click(position={"x": box["width"] - 3, "y": 10})
    page.wait_for_url("**/episodes?evaluation=after")
    page.wait_for_selector("tr[data-row]")
    assert page.locator("tr[data-row]").count() == 1


def test_the_page_can_be_used_with_the_keyboard_alone(page: Any) -> None:
    page.goto(f"/{RUN}/episodes")
    page.wait_for_selector("tr[data-row='14']")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.locator("tr[aria-selected='true'][data-row='2']").wait_for()
    page.keyboard.press("k")
    page.keyboard.press("/")
    page.keyboard.type("portugal")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=portugal*")
    until(page, "document.querySelectorAll('tr[data-row]').length === 1")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    page.wait_for_url("**/episode/lyon-1-0")
    page.wait_for_selector(".tree")
    page.keyboard.press("]")
    page.wait_for_url("**/episode/lyon-1-1*")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    page.wait_for_url("**/episodes")


def test_an_episode_shows_its_branches_and_why_a_turn_is_a_new_root(page: Any) -> None:
    page.goto(f"/{RUN}/episode/lyon-1-0")
    page.wait_for_selector(".tree button")
    assert page.locator(".tree button").count() == 4
    assert "Portugal" in page.locator(".episode .message").last.inner_text()  # the newest branch
    page.locator(".tree button").nth(2).click()
    page.wait_for_selector(".note")
    note = page.locator(".note").inner_text()
    assert "context compacted" in note and "message 2" in note
    page.locator(".tree button").nth(1).click()
    until(page, "document.querySelector('.episode').innerText.includes('Spain, says')")


def test_forks_are_branches_that_lead_to_their_pages_and_back(page: Any) -> None:
    page.goto(f"/{RUN}/episode/nice-1-0")
    page.wait_for_selector(".tree .fork")
    forks = page.locator(".tree .fork")
    assert [text.split("\n")[-1] for text in forks.all_inner_texts()] == ["1.000", "0.000"]
    assert ATTACK[:40] in forks.nth(1).inner_text() and page.locator(_IMAGES).count() == 0
    forks.nth(0).click()
    page.wait_for_url("**/episode/fork-1")
    until(page, "document.querySelector('.episode')?.innerText.includes('It is in France')")
    page.get_by_text("forked from nice-1-0 at turn 2").click()
    page.wait_for_url("**/episode/nice-1-0?turn=nice-1-0%2F2")


def test_two_episodes_are_compared_side_by_side(page: Any) -> None:
    page.goto(f"/{RUN}/group/lyon%402")
    page.get_by_label("Compare lyon-2-0").check()
    page.get_by_label("Compare lyon-2-1").check()
    page.get_by_role("button", name="Compare two").click()
    page.wait_for_selector(".differs")
    assert "turn 2, where they part, is marked" in page.locator("main").inner_text()
    assert page.locator(".differs").count() == 2


def test_the_timeline_shows_what_ran_and_can_be_zoomed(page: Any) -> None:
    page.goto(f"/{RUN}/timeline")
    until(page, "document.querySelector('.timeline canvas')?.width > 600")
    seen = pixels(page, ".timeline canvas")
    assert {(0, 7, 11), (14, 9, 0), (12, 7, 10)} & seen  # trains, publishes, evaluates
    assert "Trainer waits\n40.0 %" in page.locator("main").inner_text()
    assert page.get_by_role("button", name="All").is_disabled()
    page.keyboard.press("+")
    until(page, "!document.querySelector('.toolbar button:last-child').disabled")
    page.keyboard.press("0")
    until(page, "document.querySelector('.toolbar button:last-child').disabled")


PAGES = (
    "", RUN, f"{RUN}/timeline", f"{RUN}/episodes", f"{RUN}/step/2", f"{RUN}/group/lyon%402",
    f"{RUN}/episode/evil", f"{RUN}/episode/nice-3-1?view=tokens", f"{RUN}/config",
)  # fmt: skip


@pytest.mark.parametrize("address", PAGES)
def test_a_phone_needs_no_scrolling_sideways(page: Any, address: str) -> None:
    page.set_viewport_size({"width": 375, "height": 740})
    page.goto(f"/{address}")
    until(page, "document.querySelector('main')?.innerText.length > 20")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


def test_the_theme_follows_the_system_and_can_be_changed(page: Any) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto(f"/{RUN}/episode/nice-3-1")
    page.wait_for_selector(".message")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    until(page, "document.documentElement.dataset.theme === 'light'")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == "rgb(20, 23, 26)" and light == "rgb(251, 251, 250)"
    page.reload()
    page.wait_for_selector(".message")
    assert page.locator("html").get_attribute("data-theme") == "light"  # the choice is kept


def test_a_key_from_the_form_or_the_fragment_is_in_no_address(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("locked")
    make_run(root)
    with serving(root, key="a secret") as url:
        for start, by_form in ((url, True), (f"{url}/#key=a%20secret", False)):
            with browser.new_context() as context:
                page = context.new_page()
                page.set_default_timeout(TIMEOUT_S * 1000)
                asked: list[str] = []
                page.on("request", lambda request, asked=asked: asked.append(request.url))
                page.goto(start)
                if by_form:
                    page.get_by_label("Key").fill("wrong")
                    page.get_by_role("button", name="Open").click()
                    page.get_by_role("alert").wait_for()
                    page.get_by_label("Key").fill("a secret")
                    page.get_by_role("button", name="Open").click()
                page.get_by_role("link", name="run", exact=True).wait_for()
                assert "secret" not in page.url and not any("secret" in address for address in asked)
                assert page.evaluate("document.cookie") == ""


def test_a_folder_without_runs_says_how_to_make_one(browser: Any, tmp_path: Path) -> None:
    with serving(tmp_path) as url, browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_S * 1000)
        page.goto(url)
        page.wait_for_selector(".empty")
        assert "areal-agents train" in page.locator(".empty").inner_text()


@pytest.mark.slow
def test_a_run_of_100_000_episodes_is_shown_in_pages(browser: Any, tmp_path: Path) -> None:
    make_large_run(RunFolder(tmp_path / "large"), episodes=100_000, turns=2)
    with serving(tmp_path) as url, browser.new_context(base_url=url) as context:
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_S * 1000)
        page.goto("/#/run/large/episodes")
        page.wait_for_selector("tr[data-row='49']")
        assert page.locator("tr[data-row]").count() == 50  # one page of them
        page.get_by_role("button", name="Show more").click()
        page.wait_for_selector("tr[data-row='99']")
        page.get_by_role("searchbox").fill("needle")
        page.get_by_role("searchbox").press("Enter")
        page.wait_for_selector("tr[data-row='49']")  # the search goes on by itself until a page is full
        page.get_by_role("button", name="Show more").click()
        page.wait_for_selector("text=all 100 episodes shown")
        assert page.locator("tr[data-row]").count() == 100
        page.goto("/#/run/large/timeline")
        until(page, "document.querySelector('.timeline canvas')?.width > 600")
