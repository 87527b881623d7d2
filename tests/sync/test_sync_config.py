"""Settings of a transport that would have no effect are refused by name."""

from __future__ import annotations

import pytest

from nearpolicy.sync.config import SyncConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "/x"}, "sync.path has no effect with sync.transport=auto; set sync.transport=files"),
        ({"transport": "broadcast", "delta": False}, "sync.delta has no effect with sync.transport=broadcast"),
        ({"transport": "shared_memory", "anchor_every": 2}, "sync.anchor_every has no effect with sync.transport=sha"),
        (
            {"transport": "files", "path": "/x", "bucket_mb": 8},
            "sync.bucket_mb has no effect with sync.transport=files",
        ),
        (
            {"bucket_mb": 8},
            "sync.bucket_mb has no effect with sync.transport=auto; set sync.transport=broadcast or "
            "sync.transport=device_handles, or leave",
        ),
        ({"transport": "files"}, "sync.transport=files needs sync.path"),
        ({"transport": "files", "path": "/x", "delta": False, "anchor_every": 2}, "no effect with sync.delta=false"),
    ],
)
def test_what_has_no_effect_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        SyncConfig(**settings)


def test_a_dumped_section_is_read_again():
    for config in (
        SyncConfig(),
        SyncConfig(transport="files", path="/x"),
        SyncConfig(transport="broadcast", bucket_mb=2),
        SyncConfig(transport="device_handles", bucket_mb=2),
    ):
        assert SyncConfig(**config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("transport", "where", "expected"),
    [
        ("auto", "one_process one_host", "direct"),
        ("auto", "one_process one_host one_device on_gpus", "direct"),
        ("auto", "one_host", "shared_memory"),
        ("auto", "one_host one_device", "shared_memory"),
        ("auto", "one_host on_gpus", "shared_memory"),
        ("auto", "one_device on_gpus", "device_handles"),  # of each pair
        ("auto", "", "broadcast"),
        ("broadcast", "one_host one_device on_gpus", "broadcast"),
        ("device_handles", "one_host one_device", "device_handles"),
        ("device_handles", "one_host on_gpus", "needs a rank of the learner on the device of each generator"),
        ("device_handles", "one_process one_host", "sync.transport=device_handles has no effect where"),
        ("direct", "one_host", "needs learner and generator in one process"),
        ("broadcast", "one_process one_host", "sync.transport=broadcast has no effect where"),
        ("shared_memory", "", "needs learner and generators on one host"),
    ],
)
def test_the_transport_follows_from_where_the_roles_are(transport, where, expected):
    config = SyncConfig(transport=transport)
    facts = {"one_process": False, "one_host": False} | dict.fromkeys(where.split(), True)
    if " " not in expected:
        assert config.transport_between(**facts) == expected
        return
    with pytest.raises(ValueError, match=expected):
        config.transport_between(**facts)
