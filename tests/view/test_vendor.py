"""The libraries of the page are those that their README names, and nothing is loaded from elsewhere."""

from __future__ import annotations

import hashlib
import re

from areal_agents.view.app import STATIC

VENDOR = STATIC / "vendor"


def test_the_files_are_those_that_the_readme_names() -> None:
    named = dict(
        re.findall(
            r"^\| `([\w.\-]+)` .*`([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text(), re.MULTILINE
        )
    )
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.suffix in (".js", ".css")
    }
    assert named == found and len(found) == 3


def test_every_licence_is_there() -> None:
    licences = re.findall(r"`([\w.]+\.LICENSE)`", (VENDOR / "README.md").read_text())
    assert set(licences) == {path.name for path in VENDOR.glob("*.LICENSE")}
    assert (
        "Copyright" in (VENDOR / "preact.LICENSE").read_text()
        and "Apache License" in (VENDOR / "htm.LICENSE").read_text()
    )


def test_the_page_names_no_other_host_and_has_no_inline_code() -> None:
    own = [
        path
        for path in STATIC.rglob("*")
        if path.suffix in (".js", ".html", ".css") and path.parent != VENDOR
    ]
    assert len(own) > 15
    for path in own:
        text = path.read_text()
        assert not re.findall(r"https?://(?!www\.w3\.org/)", text), path
        assert not re.search(r"innerHTML|dangerouslySet|\beval\(|document\.write|new Function", text), path
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", (STATIC / "index.html").read_text())
