"""One scripted engine and one proxy for every integration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integration_support import Stack, running_stack
from real_tokenizers import qwen_folder


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(qwen_folder(), tmp_path_factory.mktemp("integrations") / "store.db") as stack:
        yield stack
