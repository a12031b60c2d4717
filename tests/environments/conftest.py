"""A scripted engine and a proxy for the tests of all environments, and the interpreters of these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration_support import Stack, running_stack
from real_tokenizers import qwen_folder


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(qwen_folder(), tmp_path_factory.mktemp("environments") / "store.db") as stack:
        yield stack


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> str:
    """The interpreter that has the packages of the environments (`make environments`)."""
    return str(request.config.getoption("--environments"))


@pytest.fixture(scope="session")
def verifiers_python(python: str) -> str:
    """The interpreter that has verifiers, which pins other versions of packages that the others need."""
    return _beside(python, "verifiers")


@pytest.fixture(scope="session")
def older_verifiers_python(python: str) -> str:
    """The interpreter that has verifiers 0.3."""
    return _beside(python, "older-verifiers")


@pytest.fixture(scope="session")
def nemo_gym_python(python: str) -> str:
    """The interpreter that has NeMo Gym, which is large and needs Python 3.12."""
    found = _beside(python, "nemo-gym")
    if not Path(found).exists():
        pytest.skip(f"there is no {found}: make environments-nemo-gym PYTHON312=python3.12")
    return found


def _beside(python: str, kind: str) -> str:
    environment = Path(python).absolute().parents[1]
    return str(environment.with_name(f"{environment.name}-{kind}") / "bin" / "python")


@pytest.fixture(autouse=True)
def path_as_before() -> Iterator[None]:
    """Restore sys.path after a test, because loading a class adds its folder there."""
    before = list(sys.path)
    yield
    sys.path[:] = before
