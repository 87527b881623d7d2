"""Changes between two versions of a tensor: lossless to the bit, and few bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.errors import SyncError
from nearpolicy.models.weights import digest
from nearpolicy.sync.delta import apply, encode

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int8]


def from_bits(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    found = torch.empty(len(bits), dtype=dtype)
    found.view(torch.uint8).numpy()[:] = bits.view(np.uint8)
    return found


@given(
    st.sampled_from(DTYPES),
    st.integers(0, 3000),
    st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.6, 1.0]),
    st.integers(0, 99),
)
@settings(max_examples=120, deadline=None)
def test_old_and_change_make_the_new_bits_whatever_they_are(dtype, size, share, seed):
    random = np.random.default_rng(seed)
    kind = f"<u{dtype.itemsize}"
    old = random.integers(0, np.iinfo(kind).max, size, dtype=kind, endpoint=True)  # NaN, infinities, -0.0 and all
    changed = random.integers(0, np.iinfo(kind).max, size, dtype=kind, endpoint=True) * (random.random(size) < share)
    new = from_bits(old ^ changed.astype(kind), dtype)
    target = from_bits(old, dtype)
    method, data = encode(target, new)
    assert (method == "same") == (not changed.any()) and len(data) <= new.nbytes
    apply(method, data, target)
    assert digest(target) == digest(new)


def test_far_apart_changes_are_found_again():
    old = torch.zeros(100_000, dtype=torch.bfloat16)
    new = old.clone()
    new[[0, 254, 255, 510, 766, 99_999]] = torch.tensor([1.0, float("nan"), -0.0, 3.0, 4.0, 5.0], dtype=torch.bfloat16)
    method, data = encode(old, new)
    assert method == "indices" and len(data) < 100
    apply(method, data, old)
    assert digest(old) == digest(new)


@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5)])
def test_any_shape_will_do(shape):
    old, new = torch.zeros(shape), torch.ones(shape)
    apply(*encode(old, new), old)
    assert torch.equal(old, new)


def test_a_small_update_of_bfloat16_weights_takes_at_most_four_percent():
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(1 << 20, generator=generator) * 0.02
    old, before = master.bfloat16(), 0
    for part in (0.15, 0.3):  # of the learning rate is what Adam moves a weight in a step
        new = (master + 1e-6 * part * torch.randn(master.shape, generator=generator)).bfloat16()
        share = (new.view(torch.int16) != old.view(torch.int16)).float().mean().item()
        method, data = encode(old, new)
        assert 0.003 < share < 0.03 and method == "indices"
        assert before < len(data) <= 0.04 * new.nbytes
        before = len(data)


def test_weights_that_all_changed_a_little_are_sent_as_changed_bits():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1 << 16, generator=generator)
    method, data = encode(old, old * (1 + 1e-6))
    assert method == "xor" and len(data) < 0.5 * old.nbytes


@pytest.mark.parametrize(
    ("method", "data"),
    [("raw", b"abc"), ("xor", b"nonsense"), ("indices", b"0" * 24), ("indices", b""), ("later", b"")],
)
def test_bytes_that_are_no_change_are_refused(method, data):
    with pytest.raises(SyncError, match="a change of weights"):
        apply(method, data, torch.zeros(8))
