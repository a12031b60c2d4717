"""Puts this folder on the import path, makes hypothesis generate the same examples in each run, and provides
the Python interpreters that have SGLang and vLLM."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.gpu.device import why_no_gpu

pytest.register_assert_rewrite("integration_support")

SGLANG = "--sglang"
VLLM = "--vllm"
ENVIRONMENTS = "--environments"
SGLANG_TEST_S = 900
GPU_TEST_S = 600
SLOW_TEST_S = 1800
# One certificate, whose private key no one has. Every HTTP client and every import of aiohttp reads all
# certificate authorities of the machine, which takes 30 to 50 ms, and the tests call no server that they do
# not start.
AUTHORITIES = Path(__file__).with_name("authorities.pem")

# A slow example on a busy machine says nothing about the code, so there is no deadline. `make test` generates
# the same examples in each run, so that it fails only because of a change; `make test-all` tries others.
settings.register_profile("new", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("new"), derandomize=True, database=None)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        SGLANG, metavar="PYTHON", help="the Python of an environment with SGLang, for the tests marked so"
    )
    parser.addoption(VLLM, metavar="PYTHON", help="the Python of an environment with vLLM, likewise")
    parser.addoption(
        ENVIRONMENTS, metavar="PYTHON", help="the Python that has the packages of environments, likewise"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let the tests and their processes trust no certificate authority, unless packages may be fetched."""
    if not any(config.getoption(option) for option in (SGLANG, VLLM, ENVIRONMENTS)):
        os.environ["SSL_CERT_FILE"] = str(AUTHORITIES)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that need SGLang, vLLM or the packages of environments if these are not installed.

    A real server on a CPU starts in half a minute and samples some hundred tokens a second. On a busy machine
    it is several times slower, so its tests have a longer time limit, as do the long forms of other tests.
    """
    for item in items:
        if item.get_closest_marker("timeout"):
            continue
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_S))
        elif item.get_closest_marker("sglang") or item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.timeout(SGLANG_TEST_S))
        elif item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.timeout(GPU_TEST_S))  # kernels are compiled when they are first used
    _skip_without_gpu([item for item in items if item.get_closest_marker("gpu")])
    missing = [
        option.removeprefix("--") for option in (SGLANG, VLLM, ENVIRONMENTS) if not config.getoption(option)
    ]
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        needs_missing = any(item.get_closest_marker(marker) for marker in missing)
        (left_out if needs_missing else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    if not items:
        return
    reason = why_no_gpu()
    if reason is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def sglang_python(request: pytest.FixtureRequest) -> str:
    """The absolute path of the Python that has SGLang; a symbolic link is not resolved."""
    return os.path.abspath(request.config.getoption(SGLANG))


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> str:
    """The absolute path of the Python that has vLLM; a symbolic link is not resolved."""
    return os.path.abspath(request.config.getoption(VLLM))
