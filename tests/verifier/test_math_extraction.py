r"""Where in a completion the answer stands: each form, the last of its kind, nothing from what only looks like one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.verifier.math.extraction import MOST_CANDIDATES, extract, gold_answer, without_thinking

FORMS = ["auto", "boxed", "tag", "final_answer", "hash", "last_number", "whole"]


def found(text, form="auto"):
    return extract(text, form).answer


# Boxes


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{4} ... so \boxed{\frac{1}{\sqrt{3}}}", r"\frac{1}{\sqrt{3}}"),
        (r"\fbox{9}", "9"),
        (r"\framebox{9}", "9"),
        (r"\boxed{7", None),
        ("maybe 7, 8 or 9", None),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{if } \{x\} \text{ is}}", r"\text{if } \{x\} \text{ is}"),
        (r"\boxed {12}", "12"),
        (r"\boxed 12.", "12"),
        (r"\boxed\pi", r"\pi"),
        (r"write it in \boxed so that it can be found", None),
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{3 \boxed{4}", "4"),
        (r"\boxed{4} and then \boxed{7", "4"),
        (r"{\boxed{4}} }{ unbalanced } }", "4"),
    ],
)
def test_the_last_complete_box_is_the_answer_and_without_one_there_is_none(text, answer):
    """K36."""
    assert found(text, "boxed") == answer


def test_a_box_that_is_never_closed_is_no_answer_in_any_disguise():
    """K36: a completion cut at its token limit is not read by a weaker rule."""
    assert found(r"The answer is \boxed{7") is None
    assert "never closed" in extract(r"The answer is \boxed{7").how


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (r"\boxed{3} or \boxed{4}", ["3", "4"]),
        (r"$\boxed{3}$ or $\boxed{4}$", ["3", "4"]),
        (r"either $x=\boxed{3}$ or $x=\boxed{4}$.", ["3", "4"]),
        (r"\boxed{3}, or possibly \boxed{4}", ["3", "4"]),
        (r"\boxed{3}. Or maybe \boxed{4}", ["3", "4"]),
        (r"\boxed{3} / \boxed{4}", ["3", "4"]),
        (r"\boxed{3} or 4", ["3", "4"]),
        (r"\boxed{3} (alternatively $4$)", ["3", "$4$"]),
        (r"3 or \boxed{4}", ["3", "4"]),
        (r"\boxed{1}, \boxed{2}, or \boxed{3}", ["1", "2", "3"]),
    ],
)
def test_boxes_offered_side_by_side_are_one_answer_with_all_of_them(text, values):
    assert found(text, "boxed").split(r" \text{ or } ") == values


def test_boxes_that_are_enumerated_are_a_list():
    assert found(r"The roots are \boxed{3} and \boxed{4}.") == "3, 4"
    assert found(r"The roots are \boxed{3}, \boxed{4}, \boxed{5}.") == "3, 4, 5"


@pytest.mark.parametrize(
    "text",
    [
        r"First guess \boxed{5}. Wait, I made a mistake. \boxed{7}",
        r"\boxed{5}, no, \boxed{7}",
        r"\boxed{5}\boxed{6}\boxed{7}",
        r"Is it \boxed{5} or \boxed{6}? After all it is \boxed{7}.",
        r"\boxed{7}. It could also be shown in another way.",
    ],
)
def test_a_corrected_box_does_not_count(text):
    assert found(text) == "7"


def test_a_list_of_guesses_is_no_answer():
    text = " or ".join(rf"\boxed{{{n}}}" for n in range(MOST_CANDIDATES + 1))
    assert found(text) is None
    assert found(" or ".join(map(str, range(1000)))[:-1] + " is what I think") is None


# Thinking


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r"<think>maybe \boxed{8}</think>no idea", "no idea"),
        (r"so \boxed{8}</think>no idea", "no idea"),
        ("<think>I keep thinking", ""),
        ("5<think>hm</think>6", "56"),
        ("5 <think>again", "5 "),
        ("<THINKING>a</THINKING>b", "b"),
        ("nothing", "nothing"),
    ],
)
def test_what_is_thought_is_not_said(text, said):
    assert without_thinking(text) == said
    assert found(r"<think>it is \boxed{8}</think> I do not know.", "boxed") is None


# Tags


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>2+2</think><answer>\n 4 \n</answer>", "4"),
        ("<answer>4</answer> no, <answer>5</answer>", "5"),
        ("<answer>4", None),
        ("Use <answer> and </answer> tags. <answer>6</answer>", "6"),
        ("<answer><answer>4</answer></answer>", "4"),
        (r"<answer>So it is \boxed{4}.</answer>", "4"),
        ("<answer>The answer is 4.</answer>", "4"),
        ("<ANSWER>$4$</ANSWER>", "4"),
        ("4", None),
    ],
)
def test_the_last_complete_tag_holds_the_answer(text, answer):
    assert found(text, "tag") == answer


# Final-answer marks


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She has 3+4=<<3+4=7>>7.\n#### 7", "7"),
        ("#### 18 dollars", "18 dollars"),
        ("####7", "7"),
        ("####", None),
        ("It is 5.\nA: 1,250", "1,250"),
        ("Therefore, the answer is 12.", "12"),
        ("The answer is: **3/5**", "3/5"),
        (r"The answer is $x = \frac{1}{2}$.", r"x = \frac{1}{2}"),
        ("The final answer is $12$. I hope it is correct.", "12"),
        ("**Answer:**\n\n$5$", "5"),
        ("Answer: 5 apples, because 3 + 2 = 5", "5 apples"),
        ("The answer is $5$ cm.", "$5$ cm"),
        ("The answer to the first question is 12%.", "12%"),
        ("The answer is that she has 5 apples.", "5"),
        ("The answer is 5, found in 3 steps.", "5"),
        ("the answer is not 12, it is 13", "13"),
        ("the answer is not 12 but 13", "13"),
        ("the answer is not 12", None),
        ("The answer is 5. No: the answer is 6.", "6"),
        ("The answer is east.", "east"),
        ("#### Step 2: add\nThe sum is large.", None),
        ("a = 5", None),
        ("12", None),
    ],
)
def test_what_follows_the_last_final_answer_mark_is_the_answer(text, answer):
    assert found(text, "final_answer") == answer


def test_options_of_a_multiple_choice_are_no_final_answer():
    assert found("A: 5\nB: 6\nC: 7\nI take C.", "final_answer") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 18 dollars", "18"),
        ("#### $18", "$18"),
        ("#### -3.50", "-3.50"),
        ("#### 5\nWait.\n#### 6", "6"),
        ("#### 5\n#### none", None),
        ("The answer is 7", None),
    ],
)
def test_the_number_after_the_hashes_is_read_as_gsm8k_reads_it(text, answer):
    assert found(text, "hash") == answer


# Answers without a mark


@pytest.mark.parametrize("text", ["3/4", r"\frac{3}{4}", "(1, 2)", "12 apples", "x = 5", "even", "7, 8, 9", "x^2 + 2x"])
def test_a_completion_that_is_nothing_but_an_answer_is_its_answer(text):
    assert found(f" {text}. ") == text


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("First 3, then x = -4", "-4"),
        ("It costs $1,234.50 in total", "$1,234.50"),
        (r"so the probability is $\frac{3}{4}$.", r"\frac{3}{4}"),
        (r"hence x = \frac{3}{4}", r"\frac{3}{4}"),
        ("so the point is (3, 4).", "(3, 4)"),
        ("It weighs 2 1/4 kg", "2 1/4"),
        ("this makes 15%", "15%"),
        ("We get 3, 5 and 7", "3, 5, 7"),
        ("There are not 5 but 6 of them", "6"),
        ("Well, this is 5!", "5"),
        ("H2O and x2", None),
        ("I cannot say", None),
    ],
)
def test_the_last_number_or_formula_of_a_text_is_its_answer(text, answer):
    assert found(text, "last_number") == answer


@pytest.mark.parametrize(
    "text",
    [
        "it is not 9",
        "it isn't 9",
        "it can't be 9",
        "it is neither 8 nor 9",
        r"so x \neq 9",
        "could it be 9?",
        "it is 9 or so",
        "it is 9, or something else",
    ],
)
def test_a_value_that_is_denied_or_left_open_is_no_answer(text):
    assert found(text, "last_number") is None


def test_the_strongest_form_decides_which_answer_counts():
    text = r"<answer>2</answer> #### 3" + "\nThe answer is 4. 5 in all"
    assert [found(text + more) for more in (r" \boxed{1}", "")] == ["1", "2"]
    assert found("#### 3\nThe answer is 4. So there are 5 in all") == "4"
    assert found("There are 5 in all") == "5"


# Right answers


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (" 42 ", "42"),
        ("2+2=<<2+2=4>>4\n#### 4", "4"),
        ("2+2=4 eggs\nA: 4", "4"),
        (r"We see that $x = 2$, so $\boxed{4}$.", "4"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        ("A", "A"),
    ],
)
def test_a_worked_solution_is_as_good_as_its_answer(gold, answer):
    assert gold_answer(gold) == answer


# Any text

PIECES = st.sampled_from(
    [
        r"\boxed{",
        r"\fbox",
        "{",
        "}",
        "\\",
        "$",
        "$$",
        r"\(",
        r"\)",
        "####",
        "A:",
        "the answer is ",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        " or ",
        ", ",
        "not ",
        "7",
        "-",
        ".",
        "1,000",
        "%",
        "\n",
        "(",
        ")",
        "x",
        "∞",
    ]
)
TEXTS = st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=25).map("".join))


@settings(deadline=None)
@given(TEXTS, st.sampled_from(FORMS))
def test_no_text_makes_extraction_raise(text, form):
    extraction = extract(text, form)
    assert extraction.how and (extraction.answer is None or isinstance(extraction.answer, str))
    gold_answer(text)


@settings(deadline=None)
@given(
    st.integers(-(10**9), 10**9), st.sampled_from(["\\boxed{%s}", "#### %s", "<answer>%s</answer>", "A: %s", "so %s"])
)
def test_a_number_is_found_in_every_form(number, form):
    assert found(f"Some thoughts about 12.\n{form % number}") == str(number)


REPEATED = [
    r"\boxed{",
    r"\boxed{3} or ",
    "{",
    "}",
    "$",
    "$ ",
    "$a",
    " ",
    "\n",
    "(",
    "(1,",
    "7 or ",
    "7, ",
    "#",
    "#### ",
]
REPEATED += [
    "the answer is ",
    "answer to ",
    "A: 5\n",
    "<answer>",
    "<think>",
    "\\",
    r"\(",
    r"\[",
    r"\frac",
    r"\frac{1}{",
]
REPEATED += [
    ",",
    ".",
    "-",
    "9^",
    "1,111",
    "not ",
    "a",
    "ab ",
    "*",
    '"',
    "`",
    "1e",
    "1/",
    "x=",
    "\u200b",
    "\ufdfa",
    "\uff11",
]


def test_the_time_for_extraction_grows_with_the_length_of_the_text_only():
    """Quadratic time on one of these texts would take minutes."""
    begin = time.perf_counter()
    for piece in REPEATED:
        for form in FORMS:
            extract(piece * (40_000 // len(piece)), form)
    assert time.perf_counter() - begin < 30
