"""``nearpolicy verify math``: an answer through the reward `math_verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from nearpolicy.launch.verify import Settings, TimeLimit, judged, reward_from, show, text_of


def command(
    gold: Annotated[str, typer.Option(help="The right answer, as a row has it.", show_default=False)],
    settings: Settings = None,
    answer: Annotated[str | None, typer.Option(help="The completion.", show_default=False)] = None,
    answer_file: Annotated[
        str | None, typer.Option(help="A file with the completion; - for standard input.", show_default=False)
    ] = None,
    timeout_s: TimeLimit = 10.0,
) -> None:
    """Compare an answer with the right one."""
    text = text_of("answer", answer, answer_file)
    reward = reward_from("math_verify", settings or ())
    show(judged(reward, text, {reward.answer_column: gold}, timeout_s=timeout_s))
