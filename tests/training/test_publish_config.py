"""The defaults of the `publish` section, and the combinations that it refuses."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from areal_agents.training.config import TrainerConfig
from areal_agents.training.publish.config import PublishConfig


def test_adapters_are_published_alone_unless_another_transport_is_named() -> None:
    assert TrainerConfig().publish == PublishConfig(transport="disk", pause="retract")
    for publish, transport, pause in (
        (None, "lora", "retract"),
        ({"pause": "drain"}, "lora", "drain"),
        (PublishConfig(pause="abort"), "lora", "abort"),
        ({"transport": "disk"}, "disk", "retract"),
        (PublishConfig(transport="disk"), "disk", "retract"),
        ({"transport": "broadcast", "pause": "in_place"}, "broadcast", "in_place"),
    ):
        given = {"lora": {"rank": 2}, **({} if publish is None else {"publish": publish})}
        got = TrainerConfig.model_validate(given).publish
        assert (got.transport, got.pause) == (transport, pause)
    saved = TrainerConfig.model_validate({"lora": {"rank": 2}})
    assert TrainerConfig.model_validate(saved.model_dump()) == saved


def test_an_unquoted_off_in_yaml_means_off() -> None:
    assert PublishConfig.model_validate({"verify": False}).verify == "off"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"publish": {"transport": "lora"}}, "publishes adapters, but none are trained"),
        ({"publish": {"transport": "object_storage"}}, "needs a location, the URL of a folder"),
        ({"publish": {"transport": "object_storage", "location": "bucket/x"}}, "needs a location"),
        (
            {"publish": {"transport": "object_storage", "location": "sftp://me:secret@host/x"}},
            "a URL with a password or a key would be in logs",
        ),
        *(
            ({"publish": {"transport": "object_storage", "location": url}}, "would be in logs")
            for url in (
                "s3://id:se/cret@bucket/x",
                "simplecache::s3://id:secret@bucket/x",
                "https://host/x?X-Amz-Signature=secret",
            )
        ),
        *(
            ({"publish": {"transport": "object_storage", "location": url}}, "another folder for each process")
            for url in ("memory://x", "file://mnt/shared")
        ),
        ({"publish": {"location": "s3://bucket"}}, "applies only to transport: object_storage"),
        (
            {
                "lora": {},
                "publish": {"transport": "object_storage", "location": "s3://bucket", "pause": "in_place"},
            },
            "another adapter's keys and values",
        ),
        ({"lora": {}, "publish": {"pause": "in_place"}}, "another adapter's keys and values"),
        (
            {"publish": {"transport": "tensor", "pause": "drain"}},
            "drain cannot be used with transport: tensor",
        ),
        ({"publish": {"transport": "broadcast", "pause": "drain"}}, "would sample between two buckets"),
        ({"publish": {"backend": "gloo"}}, "apply only to transport: broadcast, got disk"),
        ({"publish": {"address": "10.0.0.1"}}, "apply only to transport: broadcast"),
        (
            {"publish": {"transport": "broadcast", "backend": "nccl"}, "device": "cpu"},
            "needs a trainer on GPUs",
        ),
        ({"publish": {"transport": "disc"}}, "'delta', 'lora' or 'object_storage'"),
        ({"publish": {"bucket_mb": -1}}, "greater than or equal to 0"),
        ({"publish": {"folder_every": 0}}, "greater than or equal to 1"),
    ],
)
def test_combinations_that_cannot_work_are_refused(given: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig.model_validate(given)
