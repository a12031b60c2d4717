"""Puts this folder on the import path, and tells the tests where a real SGLang is."""

from __future__ import annotations

import os

import pytest

SGLANG = "--sglang"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        SGLANG, metavar="PYTHON", help="the Python of an environment with SGLang, for the tests marked so"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without SGLang its tests are left out: `make test-sglang` runs them."""
    if config.getoption(SGLANG):
        return
    left_out = [item for item in items if item.get_closest_marker("sglang")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("sglang")]


@pytest.fixture(scope="session")
def sglang_python(request: pytest.FixtureRequest) -> str:
    """The Python that has SGLang, from wherever it is started; a link to it stays one."""
    return os.path.abspath(request.config.getoption(SGLANG))
