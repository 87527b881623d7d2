"""The probe measures; it neither assumes exactness nor leaves anything changed."""

from __future__ import annotations

import families
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearpolicy.models import numerics
from nearpolicy.models.numerics import FAST, Numerics, probe, probe_model

SHAPES, HEADS = [(64, 128), (128, 64)], [(16, 16)]


class Products:
    """Stands for torch.nn.functional inside the probe: exact products, except under a condition."""

    def __init__(self, inexact) -> None:
        self._inexact = inexact

    def linear(self, x, weight):
        out = (x.double() @ weight.double().t()).float()  # exact in float32 whatever the kernel
        return out + 1e-6 if self._inexact(rows=len(x), threads=torch.get_num_threads()) else out


def probed(monkeypatch, inexact, max_threads=2):
    monkeypatch.setattr(numerics, "F", Products(inexact))
    monkeypatch.setattr(numerics, "_attention_is_exact", lambda *_: True)
    return probe(SHAPES, HEADS, max_threads)


def test_the_weakest_rule_is_found_where_everything_is_exact(monkeypatch):
    assert probed(monkeypatch, lambda rows, threads: False) == Numerics(min_rows=4, max_threads=2)


def test_kernels_that_change_below_some_rows_need_as_many(monkeypatch):
    assert probed(monkeypatch, lambda rows, threads: rows < 16, max_threads=1) == Numerics(min_rows=16, max_threads=1)
    assert probed(monkeypatch, lambda rows, threads: rows < 16 * threads) == Numerics(min_rows=16, max_threads=2)


def test_threads_that_change_bits_are_not_used(monkeypatch):
    assert probed(monkeypatch, lambda rows, threads: threads > 1, max_threads=3) == Numerics(min_rows=4, max_threads=1)


def test_products_that_are_never_exact_are_refused(monkeypatch):
    assert probed(monkeypatch, lambda rows, threads: rows != 160) is None


def test_attention_that_is_not_exact_is_refused(monkeypatch):
    monkeypatch.setattr(numerics, "F", Products(lambda rows, threads: False))
    monkeypatch.setattr(numerics, "_attention_is_exact", lambda d, dv, threads: d != 16)
    assert probe(SHAPES, HEADS, 2) is None
    assert probe(SHAPES, [(32, 32)], 2) is not None


@pytest.mark.parametrize("before", [1, 2])
def test_the_thread_count_is_restored_also_when_a_product_raises(monkeypatch, before):
    torch.set_num_threads(before)
    probe(SHAPES, HEADS, 2)
    assert torch.get_num_threads() == before

    def broken(**_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        probed(monkeypatch, broken)
    assert torch.get_num_threads() == before


def test_the_probe_leaves_the_default_random_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    probe(SHAPES, HEADS, 1)
    assert torch.equal(torch.rand(3), expected)


def test_a_model_is_probed_on_its_own_products(monkeypatch):
    asked = []
    monkeypatch.setattr(numerics, "probe", lambda *arguments: asked.append(arguments))
    probe_model(families.shared("deepseek_v3-dense"), 2)
    linear, heads, threads = asked[0]
    assert threads == 2
    assert heads == {(32, 32)}  # 16 without position and 16 with it; values of 32
    assert {(64, 272), (64, 128), (128, 64), (128, 64)} <= set(linear)


@given(needed=st.integers(1, 5000), min_rows=st.sampled_from([4, 8, 16, 32]), threads=st.integers(1, 8))
def test_padding_reaches_the_least_rows_in_multiples_of_four_and_no_further(needed, min_rows, threads):
    rows = Numerics(min_rows=min_rows, max_threads=threads).rows(needed, threads)
    assert rows >= needed and rows >= min_rows * threads and rows % 4 == 0
    assert rows - needed < 4 or rows == min_rows * threads


def test_fast_numerics_never_pad_far():
    assert [FAST.rows(n, 2) for n in (1, 4, 5)] == [4, 4, 8]
