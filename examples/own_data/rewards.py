"""A reward function for recipes/own_data.yaml, in both shapes. The names of the parameters decide what is passed."""

from __future__ import annotations


def right_word(completions, answer, **columns):
    """TRL's shape: lists in, one number per completion out. `answer` is a column of the data.

    1 for the right word and nothing else; 1 is what held-out accuracy calls right.
    """
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's shape: one completion in, a number or a mapping out. `ground_truth` is the column `answer`.

    `score` is the reward; the part `correct` is what held-out accuracy goes by. Half for the right word among others.
    """
    right = solution_str.strip() == ground_truth
    return {"score": 1.0 if right else 0.5 * (ground_truth in solution_str), "correct": float(right)}
