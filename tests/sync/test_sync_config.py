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
    ):
        assert SyncConfig(**config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("transport", "one_process", "one_host", "expected"),
    [
        ("auto", True, True, "direct"),
        ("auto", False, True, "shared_memory"),
        ("auto", False, False, "broadcast"),
        ("broadcast", False, True, "broadcast"),
        ("direct", False, True, "needs learner and generator in one process"),
        ("broadcast", True, True, "sync.transport=broadcast has no effect where"),
        ("shared_memory", False, False, "needs learner and generators on one host"),
    ],
)
def test_the_transport_follows_from_where_the_roles_are(transport, one_process, one_host, expected):
    config = SyncConfig(transport=transport)
    if " " not in expected:
        assert config.transport_between(one_process=one_process, one_host=one_host) == expected
        return
    with pytest.raises(ValueError, match=expected):
        config.transport_between(one_process=one_process, one_host=one_host)
