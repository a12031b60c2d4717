"""The object storage benchmark in miniature: versions are written and read."""

from __future__ import annotations

from pathlib import Path

from benchmarks.object_storage import measure


def test_changes_are_smaller_than_whole_versions(tmp_path: Path) -> None:
    found = measure(f"file://{tmp_path}/bucket", tmp_path, mb=4, changed=0.05)
    assert 4.0 < found.whole_mb < 4.01
    # 5% of the weights, each with its new value and its position
    assert 0.09 < found.changes_mb / found.whole_mb < 0.11
    assert not any((tmp_path / "bucket").rglob("*.safetensors"))
