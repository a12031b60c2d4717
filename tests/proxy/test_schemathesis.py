"""Schemathesis over the whole HTTP surface: requests that fit its document, and requests that do not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openapi_support import document
from proxy_support import RunningProxy, running_proxy
from schemathesis import APIOperation, GenerationMode
from scripted_sampler import ScriptedSampler

from areal_agents.rendering import ChatRenderer

OPERATIONS = [found.ok() for found in schemathesis.openapi.from_dict(document()).get_all_operations()]
STEADY = settings(
    derandomize=True, database=None, deadline=None, max_examples=50, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def running(renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("schemathesis") / "store.db"
    with running_proxy(path, ScriptedSampler(renderer)) as proxy:
        yield proxy


# Not `schema.parametrize`: with pytest 9.2 its tests share one id, and pytest-xdist runs only the last one.
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_no_operation_fails_or_shows_internals(
    operation: APIOperation, running: RunningProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the request, no bug is logged, and no response has a status of 500 or shows internals."""
    fits = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    fits_not = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    @STEADY
    @given(fits | fits_not)
    def asked(case: schemathesis.Case) -> None:
        if (
            len(case.path_parameters.get("episode", "x")) % 2 == 0
        ):  # an existing one, for every second request
            case.path_parameters["episode"] = running.open_episode()["id"]
        response = case.call(base_url=running.url, timeout=30)
        assert response.status_code < 500 or response.status_code == 501, response.text
        for leak in ("Traceback", 'File "', "site-packages"):
            assert leak not in response.text
        bugs = [record for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
        assert not bugs, bugs[0].getMessage()

    asked()
