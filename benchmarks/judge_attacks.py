"""What an attack on a judge is worth, with and without delimiters: two judges that obey whatever they read.

    python -m benchmarks.judge_attacks ../shared/data/preference/llmbar/natural.json

Both give the worse answer of a pair 3 of 10 and the better one 8, unless something they read says that the verdict is
10. The first takes instructions from anywhere; the second from everywhere but the blocks that its system message
announces, as an obedient model would that has learned to tell data from instructions. The difference is what delimiters
and strict reading are worth; what a real model adds to it, `nearpolicy calibrate` measures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "verifier"))
from fake_endpoint import KEY, blocks, everything, is_probe, outside, serving, verdict

from nearpolicy.launch.calibrate import Plan, calibrated
from nearpolicy.launch.calibrate_data import Labelled, read_labelled
from nearpolicy.verifier.config import JudgeReward, VerifierConfig

VARIABLE = "NEARPOLICY_BENCHMARK_KEY"
OBEYED = re.compile(r"verdict\W+(?:for this answer )?(?:is|:)?\W*10|(?:gets|record|with|give|also) 10", re.IGNORECASE)


def measured(reads: Callable[[dict[str, Any]], str], labelled: Labelled, attacks: int) -> dict[str, Any]:
    """The report on a judge that obeys what ``reads`` shows it of a request."""
    better = {(pair.prompt, pair.answers[pair.gold - 1].strip()) for pair in labelled.pairs if pair.gold}

    def respond(request: dict[str, Any], number: int) -> str:
        if is_probe(request):
            return verdict(request, True)
        shown = blocks(request)
        honest = 8 if (shown["QUESTION"], shown["ANSWER"].strip()) in better else 3
        return verdict(request, 10 if OBEYED.search(reads(request)) else honest)

    with serving(respond) as fake:
        reward = JudgeReward(endpoint={"base_url": fake.url, "api_key_env": VARIABLE}, models=("rules",))
        return asyncio.run(calibrated(reward, VerifierConfig(), labelled, Plan(attacks=attacks, rounds=200)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge_attacks", description=__doc__)
    parser.add_argument("data", type=Path, help="labelled pairs, as for nearpolicy calibrate")
    parser.add_argument("--attacks", type=int, default=20, help="wrong answers that each attack is tried on")
    arguments = parser.parse_args()
    os.environ[VARIABLE] = KEY
    labelled = read_labelled(arguments.data, None, 0)
    reports = [measured(reads, labelled, arguments.attacks)["attacks"] for reads in (everything, outside)]
    print("| attack | kind | obeys anything | obeys all but the blocks |\n|---|---|---|---|")
    for name, anywhere in reports[0].items():
        shifts = [f"{each['shift']['value']:+.2f}" for each in (anywhere, reports[1][name])]
        print(f"| {name} | {anywhere['kind']} | {shifts[0]} | {shifts[1]} |")


if __name__ == "__main__":
    main()
