"""One scripted engine and one proxy for every integration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("integration_support")

from integration_support import Stack, running_stack  # noqa: E402
from real_tokenizers import qwen_folder  # noqa: E402


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(qwen_folder(), tmp_path_factory.mktemp("integrations") / "store.db") as stack:
        yield stack
