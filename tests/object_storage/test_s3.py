"""Versions in a bucket of a real S3-compatible server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from s3_server import S3Server
from safetensors.numpy import save_file

from areal_agents.errors import ConfigError, StorageError
from areal_agents.object_storage.fetched import FetchedVersions
from areal_agents.object_storage.location import Location
from areal_agents.object_storage.uploads import Uploads

pytestmark = pytest.mark.cluster

SIZE = 20_000_000  # float32: 80 MB, several requests to read it and several parts to write it


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    if (missing := S3Server.missing()) is not None:
        pytest.skip(missing)
    with S3Server() as running:
        yield running


@pytest.fixture(autouse=True)
def environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()
    yield
    fsspec.filesystem("s3").clear_instance_cache()


def test_fetched_versions_equal_the_written_ones(tmp_path: Path) -> None:
    location = Location.open("s3://weights/prefix")
    location.check()
    assert location.names() == []
    there = location.child("run-1")
    uploads = Uploads(there, whole_every=2, keep=2)
    engine = FetchedVersions(tmp_path / "engine", there, threading.Event())
    published: list[str] = []
    values = np.arange(SIZE, dtype=np.float32)
    for version in range(4):
        values[version * 1000 : version * 1000 + 500] += 1
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        save_file({"w": values}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        written = uploads.write(folder, version)
        published.append(written.stored.folder)
        assert (written.manifest.before is None) == (version in (0, 2))
        path = engine.fetch(written.stored)
        assert (path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        uploads.forget_before(version)
    assert there.names() == published[2:]
    assert engine.received_bytes < 2 * 1.01 * 4 * SIZE
    again = Uploads(there, whole_every=2, keep=2)
    again.find_earlier(lambda: published[:3])
    again.forget_before(2)
    assert there.names() == published[2:3]  # the row of version 3 was never written


def test_a_missing_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot write s3://no-such-bucket/x/.*The bucket must exist"):
        Location.open("s3://no-such-bucket/x").check()


def test_an_unreachable_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(StorageError, match="EndpointConnectionError"):
            Location.open("s3://weights/x").read("manifest.json")


def test_the_error_for_refused_keys_does_not_contain_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(refuses=True) as other:
        for name, value in other.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match="PermissionError") as refused:
            Location.open("s3://weights/x").check()
    assert "test-secret" not in str(refused.value)
