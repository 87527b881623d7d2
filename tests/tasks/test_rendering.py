"""Token ids of prompts and text of completions: one begin token (K20), no guessing by values (K19), stops cut (K21)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearpolicy.errors import ModelError
from nearpolicy.models.tokenizer import (
    BYTE_VOCABULARY,
    Renderer,
    byte_tokenizer,
    generation_stop_ids,
    load_tokenizer,
)
from nearpolicy.records import Prompt

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
BEGIN, END, USER, ASSISTANT = 256, 257, 260, 261


def text(value: str) -> Prompt:
    return Prompt(id="t/1", task="t", text=value)


def messages(*values: str) -> Prompt:
    roles = ("user", "assistant")
    made = tuple({"role": roles[place % 2], "content": value} for place, value in enumerate(values))
    return Prompt(id="t/1", task="t", messages=made)


def test_messages_and_raw_text_have_one_begin_token_each():
    assert RENDERER.prompt_ids(messages("hi")).tolist() == [BEGIN, USER, *b"hi", ASSISTANT]
    assert RENDERER.prompt_ids(text("hi")).tolist() == [BEGIN, *b"hi"]


def test_rendered_text_that_opens_with_the_begin_token_keeps_only_that_one():
    rendered = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered.startswith(TOKENIZER.bos_token)
    assert RENDERER.prompt_ids(text(rendered)).tolist() == RENDERER.prompt_ids(messages("hi")).tolist()


def test_template_that_doubles_the_begin_token_is_mended():
    doubled = byte_tokenizer()
    doubled.chat_template = "{{ bos_token }}" + doubled.chat_template
    assert Renderer(doubled).prompt_ids(messages("hi")).tolist() == [BEGIN, USER, *b"hi", ASSISTANT]


def test_earlier_turns_of_the_assistant_are_closed():
    assert RENDERER.prompt_ids(messages("a", "b", "c")).tolist() == [
        *(BEGIN, USER, *b"a"),
        *(ASSISTANT, *b"b", END),
        *(USER, *b"c", ASSISTANT),
    ]


def test_messages_without_a_template_are_refused_by_name():
    plain = byte_tokenizer()
    plain.chat_template = None
    with pytest.raises(ModelError, match=r"prompt t/1 .* no chat template; .*model\.tokenizer"):
        Renderer(plain).prompt_ids(messages("hi"))
    assert Renderer(plain).prompt_ids(text("hi")).tolist() == [BEGIN, *b"hi"]


def test_text_ends_before_the_stop_token_and_only_the_last_one_is_cut():
    assert RENDERER.decode([*b"56", END]) == "56"
    assert RENDERER.decode([END]) == ""
    assert RENDERER.decode([]) == ""
    assert RENDERER.decode([*b"56"]) == "56"
    assert RENDERER.decode([*b"5", END, *b"6"]) == "5<|end|>6"


def test_stop_ids_of_the_model_count_beside_the_tokenizers_own():
    renderer = Renderer(TOKENIZER, stop_token_ids=[258, 257])
    assert renderer.stop_token_ids == (257, 258)
    assert renderer.decode([*b"56", 258]) == "56"


def test_text_ends_before_the_first_stop_string():
    assert RENDERER.decode([*b"42\n\nQ: next"], stop=["Q:", "\n\n"]) == "42"
    assert RENDERER.decode([*b"42"], stop=["\n"]) == "42"


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_bytes_in_are_bytes_out(value):
    ids = RENDERER.prompt_ids(text(value)).tolist()
    if "<|" not in value:
        assert ids == [BEGIN, *value.encode()]
    assert RENDERER.decode(ids[1:]) == value


def test_pad_and_end_are_different_and_every_id_of_the_vocabulary_has_a_token():
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id
    assert len(TOKENIZER) == BYTE_VOCABULARY == 272
    assert RENDERER.decode([BYTE_VOCABULARY - 1])


def test_byte_tokenizer_survives_saving(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = Renderer(load_tokenizer(str(tmp_path)))
    assert loaded.prompt_ids(messages("hé")).tolist() == RENDERER.prompt_ids(messages("hé")).tolist()
    assert loaded.stop_token_ids == RENDERER.stop_token_ids


def test_missing_tokenizer_is_a_message_that_names_the_setting(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer at .*; set model\.tokenizer"):
        load_tokenizer(str(tmp_path))


def test_end_tokens_are_read_from_the_model_folder(tmp_path):
    assert generation_stop_ids(tmp_path) == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert generation_stop_ids(tmp_path) == (2, 11)


def test_a_token_that_the_model_does_not_know_is_refused_with_both_numbers():
    renderer = Renderer(byte_tokenizer(), vocabulary=100)
    small = Prompt(id="p", task="t", messages=None, text="")
    with pytest.raises(ModelError, match=r"gives the token 256, and the model has 0 to 99; set model\.tokenizer"):
        renderer.prompt_ids(small)  # the begin token
    with pytest.raises(ModelError, match=r"gives the token 257"):
        renderer.answer_ids("A")  # the end token
    assert Renderer(byte_tokenizer(), vocabulary=258).answer_ids("A").tolist() == [65, 257]
