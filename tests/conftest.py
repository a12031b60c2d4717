"""Puts this folder on the import path, draws the same examples in each run, and knows a real SGLang."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

SGLANG = "--sglang"
SGLANG_TEST_S = 900
SLOW_TEST_S = 1800

# An example that a busy machine takes long for says nothing of the code. `make test` draws the same ones in
# each run, so that it fails only of a change; `make test-all` looks for others.
settings.register_profile("new", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("new"), derandomize=True, database=None)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        SGLANG, metavar="PYTHON", help="the Python of an environment with SGLang, for the tests marked so"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without SGLang its tests are left out: `make test-sglang` runs them.

    A real server on a CPU starts in half a minute and samples some hundred tokens a second. Beside other work
    it is several times slower, so its tests have a longer limit. So have the long forms of other tests.
    """
    for item in items:
        if item.get_closest_marker("timeout"):
            continue
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_S))
        elif item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.timeout(SGLANG_TEST_S))
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
