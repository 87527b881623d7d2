"""The learner's own backends pass `conformance`: one process, and FSDP2 with one, two and four ranks."""

from __future__ import annotations

import pytest
from conformance import CLAIMS
from fsdp_backend import Fsdp
from learner_cases import learner, model_folder


class OneProcess:
    """`PolicyLearner` as it is."""

    def run(self, function, *arguments):
        return [function(learner, *arguments)]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_one_process(claim, tmp_path):
    claim(OneProcess(), tmp_path)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_two_ranks(claim, tmp_path, rank_pool):
    model_folder()  # made once, before two processes need it
    claim(Fsdp(rank_pool, 2), tmp_path)


LAYOUTS = {"one": (1, 1), "two copies": (2, 2), "four": (4, 1), "two copies of two": (4, 2), "four copies": (4, 4)}


@pytest.mark.large
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_other_layouts(claim, layout, tmp_path, rank_pool):
    model_folder()
    claim(Fsdp(rank_pool, *LAYOUTS[layout]), tmp_path)
