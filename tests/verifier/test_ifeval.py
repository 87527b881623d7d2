"""Instructions that a program can check: every kind with responses that follow and that do not, texts made to confuse,
rows at fault, and the published prompts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.records import Outcome
from nearpolicy.verifier import rewards
from nearpolicy.verifier.config import IfevalReward
from nearpolicy.verifier.ifeval import constraints, languages, texts
from nearpolicy.verifier.ifeval.kinds import KINDS
from nearpolicy.verifier.reading import unfit
from nearpolicy.verifier.rewards import RowError, Sample, score

CAT = "The cat sleeps on the roof every afternoon and the children play with their friends in the garden"
GERMAN = "Die Katze schläft jeden Nachmittag auf dem Dach, und die Kinder spielen mit ihren Freunden im Garten."


def problem(kind, text, **kwargs):
    """What is wrong with a response to one instruction; None if it follows."""
    [found] = constraints.problems(constraints.read([kind], [kwargs]), text, loose=False)
    return found


# Kind, its kwargs, responses that follow, responses that do not
CASES = [
    (
        "keywords:existence",
        {"keywords": ["Cat", "roof top"]},
        ["a cat on the roof top", "CATALOGUE of ROOF TOPS", "ca\u200bt roof\u00ad top"],
        ["a cat on the roof", "roof top", "c at, roof top", ""],
    ),
    (
        "keywords:existence",
        {"keywords": ["c++ (fast)", "."]},
        ["C++ (fast)."],
        ["ccc fast.", "C++ (fast)"],
    ),
    (
        "keywords:frequency",
        {"keyword": "war", "frequency": 3, "relation": "at least"},
        ["war war war", "War, WARS and a warm day", "war " * 4],
        ["war war", "w ar w ar w ar", ""],
    ),
    (
        "keywords:frequency",
        {"keyword": "aa", "frequency": 3, "relation": "less than"},
        ["aaaa", "none", "aaaaa"],
        ["aaaaaa", "aa aa aa"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["rock", "new york"]},
        ["rocket rocks bedrock", "New Yorker", "rock_band"],
        ["a rock.", "ROCK", "*rock*", "in New York!", "ro\u200bck", "ro\x00ck", ""],
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["c++", "*"]}, ["c", "xc++", "C#"], ["C++", "c++, mostly", "a*b"]),
    (
        "keywords:letter_frequency",
        {"letter": "Q", "let_frequency": 2, "let_relation": "at least"},
        ["qQ", "quick question", "qqq"],
        ["q", "none", ""],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 4, "let_relation": "less than"},
        ["###", "no heading", "# a # b"],
        ["####", "#" * 9],
    ),
    (
        "language:response_language",
        {"language": "de"},
        [GERMAN, GERMAN.upper(), GERMAN * 500],
        [CAT, "", "!!!", "12345 67890", "\u0301" * 50],
    ),
    (
        "language:response_language",
        {"language": "zh-cn"},
        ["猫每天下午在屋顶上睡觉，孩子们在花园里玩耍。"],
        [CAT, GERMAN],
    ),
    (
        "change_case:english_capital",
        {},
        [CAT.upper(), f"{CAT.upper()}! 3."],
        [CAT, CAT.upper()[:-1] + "n", "!!!", GERMAN.upper()],
    ),
    (
        "change_case:english_lowercase",
        {},
        [CAT.lower(), f"{CAT.lower()}! 3."],
        [CAT, CAT.upper(), "123", GERMAN.lower(), ""],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": "at least"},
        ["ONE TWO THREE", "I saw NASA in the U.S. today", "**COVID-19**, A and DON'T"],
        ["ONE TWO Three", "DON'T STOP", "1 2 3 4", ""],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["One WORD", "none"],
        ["ONE WORD", "I AM"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        [
            "One. Two! Three?",
            "One.\nTwo.\nThree",
            'He said "Yes." Then he left. End',
            "What?! No... Yes.",
            "一。二！三？",
        ],
        [
            "One. Two.",
            "Mr. A. Smith of Acme Inc. met Dr. Jones. The end.",
            "1. One\n2. Two\n3. Three",
            "! ! !",
            ". . . .",
            "",
        ],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        [
            "One. Two.",
            "It costs $3.50, i.e. less. Buy it at www.shop.com/a.b today",
            "well... so... no... yes",
            "no end",
        ],
        ["One. Two. Three.", "a. b. c. d. e. f."],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "at least"},
        ["one two three four", "a well-known don't", "1 2 3 4", "यह एक छोटी बिल्ली"],
        ["one two three", "... --- ...", "o\u200bn\u200be t\u200bw\u200bo", "बिल्ली बिल्ली", ""],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "less than"},
        ["one two three", "!"],
        ["a b c d", "a b c d e"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "one *** two", "***\none\n***\ntwo\n***", "one\n\nstill one\n***\ntwo"],
        ["one", "one\n\ntwo", "a *** b *** c", "one\n***\n\n***\ntwo", "one\n***\n", "***", ""],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "Well"},
        ["a\n\nWell, b\n\nc", 'a\n\n\n\n  "well" b\nb\n \nc\n', "a\r\n\r\nWELL: b\r\n\r\nc"],
        ["a\n\nwellness b\n\nc", "a\n\nwell b", "a\n\nb\n\nwell c", "a\n\nwell\n\nc\n\nd", "a\nwell\nc", "", "\n\n"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] and [address]", "[a][b]", "[[a] [b]", "x [a]\n[b c] [d]"],
        ["[name]", "[] [ ]", "[a\nb] [c]", "]a[ [b]", "[" * 9, ""],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["Bye.\nP.P.S. I know", "p. p. s. so", "Bye. P.P.S: yes"],
        ["P.S. I know", "Bye.\nP.P.S.", "PPS yes", "P.P. S", ""],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["P.S. so", "p.s.\nso"],
        ["P.S so", "up.s. so", "P.S. !"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "Text:\n\n* a\n\n-b\nend", "* a\n***\n* b\n---\n- - -"],
        ["* a", "* a\n* b\n* c", "** a\n** b", "1. a\n2. b", "• a\n• b", "* a\n*\n*", "a * b\na - b", ""],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "  Well: My answer is maybe. ", "My answer is no. My answer is no."],
        ["My answer is yes", "my answer is no.", "My answer is yes. My answer is no.", "yes", ""],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and *b c*", "**a****b**", "*a* *b* *c*"],
        ["*a*", "** ** * *", "****", "*a\nb* *c*", "* a\n* b", "**a* b", ""],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION1 SECTION\n2", "intro SECTION 7: a SECTION 9 b SECTION 10"],
        ["SECTION 1 a", "Section 1 Section 2", "SECTION one SECTION two", "SECTION 1 SECTION 1", "1 2", ""],
    ),
    (
        "detectable_format:title",
        {},
        ["<<poem>>", "<<poem of joy>>\ntext", "text <<<a>>> text"],
        ["<poem>", "<<>>", "<< >>", "<<poem\nof joy>>", ">>poem<<", "<<<>>>", ""],
    ),
    (
        "detectable_format:json_format",
        {},
        [
            '{"a": [1, 2.5e3, null, "x"]}',
            ' ```json\n{"a": 1}\n``` ',
            "```JSON\n[]\n```",
            "```\n{}```",
            "9" * 9999,
            '"text"',
        ],
        [
            "{'a': 1}",
            '{"a": 1,}',
            "Here: {}",
            "NaN",
            "[Infinity]",
            "```python\n{}\n```",
            "{} {}",
            "[" * 100_000,
            "",
            "\x00",
        ],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": " Write a poem. \nNow"},
        ["Write a poem. \nNow\nRoses", "  write A poem. \r\nnow: roses"],
        ["Roses. Write a poem. \nNow", "Write a poem.", '"Write a poem. \nNow"', ""],
    ),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "******\none\n******\ntwo\n******", "one******two"],
        ["one", "one\n******\n", "a******b******c", "one\n****** one", "one\n************\ntwo", "a\n*****\nb", ""],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Any other questions?"},
        [
            "So it is. Any other questions?",
            "any other questions?\n",
            '"Well. Any other questions? "',
            "ANY OTHER QUESTIONS?",
        ],
        ["Any other questions? No.", "Any other questions", "Any  other questions?", ""],
    ),
    (
        "startend:quotation",
        {},
        ['"a"', ' "a "b" c"\n', '"a" and "b"'],
        ['"a', 'a"', "'a'", "“a”", '"', '""', '"""', '" "', "", '\x00"'],
    ),
    (
        "punctuation:no_comma",
        {},
        ["No commas here; none.", "it's", "1.5"],
        ["a, b", "1,000", ",", "一，二", "a، b", "a、b", "a\ufe50b", ""],
    ),
]
FOLLOWING = [(kind, kwargs, text) for kind, kwargs, texts_, _ in CASES for text in texts_]
VIOLATING = [(kind, kwargs, text) for kind, kwargs, _, texts_ in CASES for text in texts_]


def test_the_cases_are_about_all_25_kinds():
    assert {kind for kind, *_ in CASES} == set(KINDS)
    assert len(KINDS) == 25


@pytest.mark.parametrize(("kind", "kwargs", "text"), FOLLOWING)
def test_a_response_that_follows(kind, kwargs, text):
    assert problem(kind, text, **kwargs) is None


@pytest.mark.parametrize(("kind", "kwargs", "text"), VIOLATING)
def test_a_response_that_does_not_follow_is_told_what_is_wrong(kind, kwargs, text):
    assert problem(kind, text, **kwargs)


@pytest.mark.parametrize(
    ("kind", "argument", "relation", "unit"),
    [
        ("keywords:frequency", "frequency", "relation", "cat "),
        ("keywords:letter_frequency", "let_frequency", "let_relation", "x"),
        ("length_constraints:number_words", "num_words", "relation", "word "),
        ("length_constraints:number_sentences", "num_sentences", "relation", "So it is. "),
        ("change_case:capital_word_frequency", "capital_frequency", "capital_relation", "WORD "),
    ],
)
@given(found=st.integers(0, 12), asked=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_at_least_and_less_than_are_each_others_opposite_and_exact(kind, argument, relation, unit, found, asked):
    rest = {"keyword": "cat", "letter": "x"}
    kwargs = {name: rest[name] for name in KINDS[kind].arguments if name in rest} | {argument: asked}
    text = "- " + unit * found
    assert (problem(kind, text, **kwargs, **{relation: "at least"}) is None) == (found >= asked)
    assert (problem(kind, text, **kwargs, **{relation: "less than"}) is None) == (found < asked)


@pytest.mark.parametrize(
    ("kind", "argument", "unit"),
    [
        ("detectable_content:number_placeholders", "num_placeholders", "[a] "),
        ("detectable_format:number_highlighted_sections", "num_highlights", "**a** "),
    ],
)
@given(found=st.integers(0, 12), asked=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_more_than_asked_for_is_enough(kind, argument, unit, found, asked):
    assert (problem(kind, "- " + unit * found, **{argument: asked}) is None) == (found >= asked)


@given(found=st.integers(0, 12), asked=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_bullets_and_paragraphs_are_asked_for_exactly(found, asked):
    bullets = problem("detectable_format:number_bullet_lists", "list\n" + "* a\n" * found, num_bullets=asked)
    assert (bullets is None) == (found == asked)
    paragraphs = problem("length_constraints:number_paragraphs", "***".join("p" * (found + 1)), num_paragraphs=asked)
    assert (paragraphs is None) == (found + 1 == asked)


# Texts made to confuse

EVERYTHING = {
    "keywords": ["aa", "x y"],
    "keyword": "aa",
    "frequency": 2,
    "relation": "at least",
    "forbidden_words": ["a", "*", "aa aa"],
    "letter": "a",
    "let_frequency": 3,
    "let_relation": "less than",
    "language": "sw",
    "num_sentences": 3,
    "num_paragraphs": 3,
    "num_words": 3,
    "nth_paragraph": 2,
    "first_word": "aa",
    "num_placeholders": 2,
    "postscript_marker": "P.P.S",
    "num_bullets": 2,
    "num_highlights": 2,
    "section_spliter": "aa",
    "num_sections": 3,
    "prompt_to_repeat": "aa",
    "end_phrase": "aa",
    "capital_frequency": 2,
    "capital_relation": "at least",
}


def one_of_each_kind():
    kwargs = [{name: EVERYTHING[name] for name in kind.arguments} for kind in KINDS.values()]
    return {"instruction_id_list": list(KINDS), "kwargs": kwargs}


ROW = one_of_each_kind()


def verdict(text, row=ROW, **options):
    return score(IfevalReward(**options), Sample(text=text, columns=row, completion_ids=[], task="t"))


@given(st.text() | st.text("\x00*[]<>\"'.!? \n-_`{}:,aP\u200b\u0301\ud800\U000e0041", max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_ends_in_a_verdict_with_a_part_for_each_kind(text):
    strict, loose = verdict(text), verdict(text, form="loose", credit="share")
    for found in (strict, loose):
        assert found.outcome is Outcome.SCORED
        assert set(found.parts) == {"all", "share", *KINDS}
        assert found.parts["share"] == pytest.approx(sum(found.parts[kind] for kind in KINDS) / 25)
    assert all(loose.parts[kind] >= strict.parts[kind] for kind in KINDS)
    assert strict == verdict(text)


SMALL = 5_000
PIECES = [
    *("a", "A", "é", "क", "_", "aa ", "a-", "A'", "a.", "p.", "P.P.S", "aa1", "\u0301", "\u0316\u0301", "\ud800"),
    *("*", "**", "***", "******", "* ", "*a ", ".", ". ", '."', ".)", "!", "1.", "1. ", "\n1. ", ",", "-", "~", "#"),
    *("[", "]", "[]", "(", "<", "<<", ">", ">>", "`", "'", '"', '"a",', '\\"', "{", "}", '{"a":', '["', "\\"),
    *(" ", "\t", "\n", "\r", "\n ", " \n", "\n\n", "\n-", "\u200b", "\x00"),
]


@pytest.mark.parametrize("piece", PIECES, ids=repr)
def test_time_is_linear_in_a_text_of_one_piece_over_and_over(piece):
    verdict(CAT)  # the model of languages is read here
    took = {}
    for size in (SMALL, 8 * SMALL):
        text = piece * (size // len(piece)) + "b"
        begin = time.process_time()
        assert verdict(text).outcome is Outcome.SCORED
        took[size] = time.process_time() - begin
    # Eight times the text; a quadratic check would take 64 times as long, and the noise of short times is let pass.
    assert took[8 * SMALL] < 24 * took[SMALL] + 0.2


@pytest.mark.parametrize("piece", ["a", ". ", "[", "\n", "\u0301\u0316", '{"a":', "* *\n"], ids=repr)
def test_a_million_characters_are_judged_within_the_usual_time_limit(piece):
    begin = time.process_time()
    assert verdict(piece * (1_000_000 // len(piece))).outcome is Outcome.SCORED
    assert time.process_time() - begin < 10


# The language of a text

SENTENCES = {
    "ar": "القطة تنام على السطح كل يوم بعد الظهر، والأطفال يلعبون في الحديقة مع أصدقائهم.",
    "bg": "Котката спи на покрива всеки следобед, а децата играят в градината със своите приятели.",
    "bn": "বিড়ালটি প্রতিদিন বিকেলে ছাদে ঘুমায় এবং শিশুরা তাদের বন্ধুদের সঙ্গে বাগানে খেলা করে।",
    "de": "Die Katze schläft jeden Nachmittag auf dem Dach, und die Kinder spielen mit ihren Freunden im Garten.",
    "en": "The cat sleeps on the roof every afternoon, and the children play with their friends in the garden.",
    "es": "El gato duerme en el tejado todas las tardes y los niños juegan con sus amigos en el jardín.",
    "fa": "گربه هر روز بعد از ظهر روی پشت بام می‌خوابد و بچه‌ها با دوستان خود در باغ بازی می‌کنند.",
    "fi": "Kissa nukkuu katolla joka iltapäivä, ja lapset leikkivät ystäviensä kanssa puutarhassa.",
    "fr": "Le chat dort sur le toit chaque après-midi et les enfants jouent avec leurs amis dans le jardin.",
    "gu": "બિલાડી દરરોજ બપોરે છત પર સૂઈ જાય છે અને બાળકો બગીચામાં તેમના મિત્રો સાથે રમે છે.",
    "he": "החתול ישן על הגג כל אחר הצהריים, והילדים משחקים עם החברים שלהם בגינה.",
    "hi": "बिल्ली हर दोपहर छत पर सोती है और बच्चे बगीचे में अपने दोस्तों के साथ खेलते हैं।",
    "it": "Il gatto dorme sul tetto ogni pomeriggio e i bambini giocano con i loro amici nel giardino.",
    "ja": "猫は毎日午後に屋根の上で寝ていて、子供たちは庭で友達と遊んでいます。",
    "kn": "ಬೆಕ್ಕು ಪ್ರತಿದಿನ ಮಧ್ಯಾಹ್ನ ಛಾವಣಿಯ ಮೇಲೆ ಮಲಗುತ್ತದೆ ಮತ್ತು ಮಕ್ಕಳು ತೋಟದಲ್ಲಿ ಆಡುತ್ತಾರೆ.",
    "ko": "고양이는 매일 오후 지붕 위에서 잠을 자고 아이들은 정원에서 친구들과 놀고 있습니다.",
    "ml": "പൂച്ച എല്ലാ ദിവസവും ഉച്ചയ്ക്ക് മേൽക്കൂരയിൽ ഉറങ്ങുന്നു, കുട്ടികൾ തോട്ടത്തിൽ കളിക്കുന്നു.",
    "mr": "मांजर रोज दुपारी छतावर झोपते आणि मुले बागेत आपल्या मित्रांसोबत खेळतात.",
    "ne": "बिरालो हरेक दिउँसो छानामा सुत्छ र केटाकेटीहरू बगैंचामा आफ्ना साथीहरूसँग खेल्छन्।",
    "pa": "ਬਿੱਲੀ ਹਰ ਰੋਜ਼ ਦੁਪਹਿਰ ਨੂੰ ਛੱਤ ਉੱਤੇ ਸੌਂਦੀ ਹੈ ਅਤੇ ਬੱਚੇ ਬਾਗ ਵਿੱਚ ਆਪਣੇ ਦੋਸਤਾਂ ਨਾਲ ਖੇਡਦੇ ਹਨ।",
    "pl": "Kot śpi na dachu każdego popołudnia, a dzieci bawią się w ogrodzie ze swoimi przyjaciółmi.",
    "pt": "O gato dorme no telhado todas as tardes e as crianças brincam com os seus amigos no jardim.",
    "ru": "Кошка спит на крыше каждый день после обеда, а дети играют в саду со своими друзьями.",
    "sw": "Paka hulala juu ya paa kila alasiri na watoto hucheza na marafiki zao katika bustani.",
    "ta": "பூனை ஒவ்வொரு நாளும் மதியம் கூரையில் தூங்குகிறது, குழந்தைகள் தோட்டத்தில் விளையாடுகிறார்கள்.",
    "te": "పిల్లి ప్రతిరోజూ మధ్యాహ్నం పైకప్పు మీద నిద్రిస్తుంది మరియు పిల్లలు తోటలో ఆడుకుంటారు.",
    "th": "แมวนอนบนหลังคาทุกบ่าย และเด็กๆ เล่นกับเพื่อนในสวน",
    "uk": "Кішка спить на даху щодня після обіду, а діти граються в саду зі своїми друзями.",
    "ur": "بلی ہر دوپہر چھت پر سوتی ہے اور بچے باغ میں اپنے دوستوں کے ساتھ کھیلتے ہیں۔",
    "vi": "Con mèo ngủ trên mái nhà mỗi buổi chiều và trẻ em chơi với bạn bè trong vườn.",
    "zh": "猫每天下午在屋顶上睡觉，孩子们在花园里和朋友们玩耍。",
}


@pytest.mark.parametrize("code", SENTENCES)
def test_a_sentence_is_told_to_be_in_its_language_alone_and_always_alike(code):
    assert languages.language_of(SENTENCES[code]) == code
    others = [problem("language:response_language", SENTENCES[code], language=other) for other in SENTENCES]
    assert others.count(None) == 1
    assert {languages.language_of(SENTENCES[code] * 3) for _ in range(5)} == {code}


@pytest.mark.parametrize("text", ["", " ", "!!!", "12 + 34 = 46", "\x00" * 50, "<b></b>", "\u200b", "- - -\n***"])
def test_a_text_without_words_is_in_no_language(text):
    assert languages.language_of(text) is None


# Strict and loose


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        ("Sure, here it is:\nno comma", False, True),
        ("no comma\nHope this, well, helps", False, True),
        ("Sure, so:\nno comma\nBye, then", False, True),
        ("no comma", True, True),
        ("a, b", False, False),
        ("a\nb, c\nd", False, False),
        ("", False, False),
        (",\n,", False, False),
    ],
)
def test_the_loose_form_lets_a_first_and_a_last_line_go(text, strict, loose):
    row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert verdict(text, row).value == strict
    assert verdict(text, row, form="loose").value == loose


def test_the_loose_form_lets_asterisks_go():
    row = {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "Peace!"}]}
    assert verdict("**Peace!**", row).value == 0.0
    assert verdict("**Peace!**", row, form="loose").value == 1.0


def test_the_eight_forms_of_a_text():
    assert constraints.forms("*a*\nb\n*c*") == ["*a*\nb\n*c*", "b\n*c*", "*a*\nb", "b", "a\nb\nc", "b\nc", "a\nb"]
    assert constraints.forms("a") == ["a", ""]


# What a verdict says

TWO = {
    "instruction_id_list": ["punctuation:no_comma", "keywords:existence", "keywords:existence"],
    "kwargs": [{}, {"keywords": ["cat"]}, {"keywords": ["dog", "cow"]}],
}


def test_value_is_all_or_the_share_and_parts_are_named_after_kinds():
    found = verdict("a cat", TWO)
    parts = {"all": 0.0, "share": 2 / 3, "punctuation:no_comma": 1.0, "keywords:existence": 0.5}
    assert (found.value, dict(found.parts)) == (0.0, parts)
    assert found.reason == "not followed: keywords:existence (without 'dog', 'cow')"
    assert verdict("a cat", TWO, credit="share").value == 2 / 3
    whole = verdict("cat dog cow", TWO, credit="share")
    assert (whole.value, whole.reason, set(whole.parts.values())) == (1.0, "", {1.0})


def test_a_reason_is_never_longer_than_a_log_bears():
    row = {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["x" * 3000]}]}
    assert len(verdict("a", row).reason) <= rewards.LONGEST_REASON


# Rows at fault

NO_COMMA = "punctuation:no_comma"
WORDS = "length_constraints:number_words"


@pytest.mark.parametrize(
    ("identifiers", "kwargs", "says"),
    [
        (["punctuation:no_coma"], [{}], "no instruction 'punctuation:no_coma'; did you mean 'punctuation:no_comma'?"),
        ([["a"]], [{}], "no instruction"),
        ([None], [{}], "no instruction"),
        ([], [], "there are no instructions"),
        ([NO_COMMA], [], "1 instructions have 0 kwargs"),
        ([NO_COMMA], [{}, {}], "1 instructions have 2 kwargs"),
        ("punctuation:no_comma", [{}], "text that is no JSON"),
        ([NO_COMMA], "[{}", "text that is no JSON"),
        ([NO_COMMA], "[" * 100_000, "text that is no JSON"),
        ({"a": 1}, [{}], "should be a list, found dict"),
        ([NO_COMMA], ["x"], "should be a mapping, found str"),
        ([NO_COMMA], [{"num_words": 3}], "does not take num_words; its kwargs are: none"),
        ([WORDS], [{"relation": "at least"}], "kwargs lack num_words"),
        ([WORDS], [{"relation": "at least", "num_words": None}], "kwargs lack num_words"),
        ([WORDS], [None], "kwargs lack num_words, relation"),
        ([WORDS], [{"relation": "at most", "num_words": 3}], "relation is 'at most'; it should be 'at least' or"),
        ([WORDS], [{"relation": ["at least"], "num_words": 3}], "it should be 'at least' or"),
        ([WORDS], [{"relation": "at least", "num_words": 0}], "whole number, 1 or more"),
        ([WORDS], [{"relation": "at least", "num_words": True}], "whole number, 1 or more"),
        ([WORDS], [{"relation": "at least", "num_words": "3"}], "whole number, 1 or more"),
        ([WORDS], [{"relation": "at least", "num_words": 2.5}], "whole number, 1 or more"),
        ([WORDS], [{"relation": "at least", "num_words": float("nan")}], "whole number, 1 or more"),
        ([WORDS], [{"relation": "at least", "num_words": float("inf")}], "whole number, 1 or more"),
        (["keywords:existence"], [{"keywords": []}], "list of words"),
        (["keywords:existence"], [{"keywords": "cat"}], "list of words"),
        (["keywords:existence"], [{"keywords": ["cat", " "]}], "should be text"),
        (["keywords:existence"], [{"keywords": ["cat", "\u200b"]}], "should be text"),
        (
            ["keywords:letter_frequency"],
            [{"letter": "ab", "let_frequency": 1, "let_relation": "at least"}],
            "letter is 'ab'; it should be one character",
        ),
        (["language:response_language"], [{"language": "xx"}], "it should be one of af, ar, bg"),
        (["startend:end_checker"], [{"end_phrase": '"'}], "more than quotation marks"),
        (
            ["length_constraints:nth_paragraph_first_word"],
            [{"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"}],
            "there is no paragraph 3 of 2",
        ),
        (
            ["length_constraints:nth_paragraph_first_word"],
            [{"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "..."}],
            "first_word is '...'; it should be a word",
        ),
    ],
)
def test_a_row_at_fault_is_a_failed_verdict_and_is_found_before_a_run(identifiers, kwargs, says):
    row = {"instruction_id_list": identifiers, "kwargs": kwargs}
    found = verdict("a response", row)
    assert (found.outcome, found.value) == (Outcome.FAILED, None)
    assert says in found.reason
    [(place, column, wrong)] = unfit(IfevalReward(), [ROW, row])
    assert (place, column) == (1, "instruction_id_list") and says in wrong


@pytest.mark.parametrize("column", ["instruction_id_list", "kwargs"])
def test_a_row_without_a_column_is_a_failed_verdict(column):
    found = verdict("a", {name: value for name, value in ROW.items() if name != column})
    assert found.outcome is Outcome.FAILED and f"'{column}' is missing" in found.reason


def test_columns_may_have_other_names_and_be_json_and_tables_may_hold_nulls():
    reward = IfevalReward(instructions_column="ids", kwargs_column="arguments")
    nulls = dict.fromkeys(EVERYTHING)
    row = {
        "ids": json.dumps([WORDS, NO_COMMA]),
        "arguments": [nulls | {"relation": "less than", "num_words": 3.0}, nulls],
    }
    assert reward.columns == ("ids", "arguments")
    assert score(reward, Sample(text="a b", columns=row, completion_ids=[], task="t")).value == 1.0
    row["arguments"] = json.dumps(row["arguments"])
    assert [c.kind for c in rewards.constraints_of(reward, row)] == [WORDS, NO_COMMA]


def test_it_is_scored_where_a_limit_can_be_enforced_and_a_limit_is_never_a_zero():
    assert not rewards.runs_inline(IfevalReward())
    assert rewards.controls(IfevalReward(), ROW) == ()  # without them, who is to blame stays open: a failed verdict


# The published prompts


def published() -> list[dict]:
    folder = Path(os.environ.get("NEARPOLICY_DATA", Path(__file__).parents[3] / "shared" / "data"))
    file = folder / "ifeval" / "input_data.jsonl"
    if not file.is_file():
        pytest.skip(f"no {file}; set NEARPOLICY_DATA to a folder that holds ifeval/input_data.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_all_published_rows_can_be_read_and_hold_every_kind():
    rows = published()
    assert len(rows) == 541
    assert list(unfit(IfevalReward(), rows)) == []
    read = [rewards.constraints_of(IfevalReward(), row) for row in rows]
    assert {constraint.kind for constraints_ in read for constraint in constraints_} == set(KINDS)


def test_no_published_prompt_is_followed_by_an_empty_response_or_by_chatter():
    for row in published():
        assert verdict("", row).value == verdict("", row, form="loose").value == 0.0
        assert verdict("ok, fine, sure", row, credit="share").outcome is Outcome.SCORED


def test_the_published_prompts_themselves_are_english():
    found = [languages.language_of(row["prompt"].lower()) for row in published()]
    assert found.count("en") >= 0.99 * len(found)


# Sentences and words


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("...", 0),
        ("no end", 1),
        ("One. Two.", 2),
        ("One.Two.", 1),
        ("Version 3.1 costs $2.50. Buy it.", 2),
        ("Mrs. Brown met Mr. Grey at St. Pauls.", 1),
        ("We use e.g. this and i.e. that. So!", 2),
        ("He lives in the U.S. He likes it.", 2),
        ("He lives in the U.S. and likes it.", 1),
        ("So do I. You too.", 2),
        ("J. R. Smith wrote it. Good.", 2),
        ("Apples, pears etc. are fruit. Yes.", 2),
        ("Really?! Yes!!! No...", 3),
        ("Well... maybe. Well... Maybe.", 3),
        ('"Stop." (He did.) **Good.** Fine.', 4),
        ("1. Buy milk.\n2. Buy eggs.\n   a. Brown ones.", 3),
        ("In 1999. In 2000.", 2),
        ("all is small. it still counts. see?", 3),
        ("一。二！三？四", 4),
        ("यह है। वह भी।", 2),
    ],
)
def test_sentences_are_counted_by_the_documented_rules(text, count):
    assert texts.count_sentences(text) == count


def test_unseen_characters_neither_split_words_nor_hide_them():
    assert texts.seen("a\u200bb\x00c\u00add\ufeff \r\n\re\ufe0f") == "abcd \n\ne"
    assert texts.count_words(texts.seen("می\u200cخواهم")) == 1
    assert texts.count_words("caf\u0065\u0301 d'été") == 3


def test_a_message_about_a_row_names_the_column():
    with pytest.raises(RowError, match="the column 'instruction_id_list' cannot be used: there are no instructions"):
        rewards.constraints_of(IfevalReward(), {"instruction_id_list": [], "kwargs": []})
