"""`nearpolicy doctor`: what it says of a machine, of a model, and of an isolation that cannot be used after all."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch

from nearpolicy.launch import doctor
from nearpolicy.launch import doctor_machine as of_machine
from nearpolicy.launch import doctor_model as of_model
from nearpolicy.launch.cli import run as cli
from nearpolicy.models.loading import load_policy, resolve
from nearpolicy.models.numerics import Numerics
from nearpolicy.models.tokenizer import load_tokenizer
from nearpolicy.verifier.sandbox import ladder
from nearpolicy.verifier.sandbox.ladder import Opened
from nearpolicy.verifier.sandbox.runs import Ended


class Fake:
    def __init__(self, ended):
        self.ended, self.closed = ended, False

    async def run(self, run, on_frame=None):
        if isinstance(self.ended, Exception):
            raise self.ended
        return self.ended

    async def close(self):
        self.closed = True


def examined(monkeypatch, ended):
    """What is said by isolation, and the sandboxes."""
    sandboxes = []

    async def attacked(isolation, **_):
        sandboxes.append(Fake(ended))
        return Opened(sandbox=sandboxes[-1], isolation=isolation)

    monkeypatch.setattr(ladder, "attacked", attacked)
    try:
        return dict(asyncio.run(doctor._isolation(["numpy"]))), sandboxes
    except RuntimeError:
        return {}, sandboxes


def test_an_isolation_whose_runs_fail_does_not_withstand(monkeypatch):
    said, sandboxes = examined(monkeypatch, Ended(failure="no more processes"))
    assert "FAILS: a program cannot be run: no more processes" in said["namespaces"]
    assert "none" in said["auto takes"] and all(each.closed for each in sandboxes)
    said, _ = examined(monkeypatch, Ended())
    assert said["namespaces"].startswith("withstands") and said["auto takes"] == "namespaces"


def test_a_sandbox_is_closed_whatever_its_runs_do(monkeypatch):
    _, sandboxes = examined(monkeypatch, RuntimeError("a mistake"))
    assert sandboxes and all(each.closed for each in sandboxes)


# Machine


def by_label(findings) -> dict[str, tuple[str, str]]:
    return {each.label: (each.verdict, each.text) for each in findings}


def test_threads_that_collapse_beside_a_busy_process_are_told():
    assert of_machine.thread_paces(2, {1: 100.0, 2: 190.0}, {1: 100.0, 2: 95.0}).verdict == "ok"
    collapsed = of_machine.thread_paces(2, {1: 100.0, 2: 190.0}, {1: 100.0, 2: 12.0})
    assert collapsed.verdict == "note" and "passive" in collapsed.text


def test_settings_of_threads_that_a_person_made_are_told():
    found = by_label(of_machine.thread_settings({"OMP_WAIT_POLICY": "active", "OMP_PROC_BIND": "true"}))
    assert found["OMP_WAIT_POLICY"][0] == found["OMP_PROC_BIND"][0] == "note"
    assert by_label(of_machine.thread_settings({"OMP_WAIT_POLICY": "PASSIVE"}))["OMP_WAIT_POLICY"][0] == "ok"


def test_little_memory_is_told(tmp_path):
    source = tmp_path / "meminfo"
    for free, verdict in ((900_000, "note"), (9_000_000, "ok")):
        source.write_text(f"MemTotal: 16000000 kB\nMemAvailable: {free} kB\n")
        [found] = of_machine.memory(source)
        assert found.verdict == verdict


def test_packages_outside_their_range_are_wrong_and_untested_ones_a_note():
    wanted, tested = ["torch>=2.11", "numpy>=2", "typer>=0.15", 'pytest>=8; extra == "test"'], {"numpy": "2.4.6"}
    here = {"torch": "2.10.0+cpu", "numpy": "2.5.0"}
    found = by_label(of_machine.versions(wanted, tested, here.get))
    assert found["torch"][0] == "wrong" and ">=2.11" in found["torch"][1]
    assert found["typer"] == ("wrong", "is missing; pip install 'typer>=0.15'")
    assert found["packages"][0] == "note" and "numpy 2.5.0 (2.4.6)" in found["packages"][1]
    assert "pytest" not in found


def test_rows_that_depend_on_their_neighbours_are_told():
    assert of_machine.invariance_said(None).verdict == "note"
    assert "from 16 rows a thread" in of_machine.invariance_said(Numerics(min_rows=16, max_threads=1)).text


# Models


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A folder of its own, to be spoiled."""
    source = resolve("random:llama", {"initializer_range": 0.15}, seed=2)
    return Path(shutil.copytree(source, tmp_path / "tiny"))


def test_a_sound_model_has_nothing_wrong_and_its_engine_agrees_to_the_bit(tiny, capsys):
    with pytest.raises(SystemExit) as ended:
        cli(["doctor", "--model", str(tiny)])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "nothing is wrong" in said
    for temperature in ("0.5", "1", "2"):
        assert f"temperature {temperature} " in said
    assert said.count("equal to the bit") == 3 and "tied, one memory" in said


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def change(folder: Path, name: str, **values) -> None:
    (folder / name).write_text(json.dumps(read(folder, name) | values))


def without_ends(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    change(folder, "config.json", eos_token_id=None)
    change(folder, "tokenizer_config.json", eos_token=None)


def template(text: str):
    def spoil(folder: Path) -> None:
        tokenizer = load_tokenizer(str(folder))
        tokenizer.chat_template = text
        tokenizer.save_pretrained(folder)

    return spoil


TURNS = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + CONTENT }}{% if m['role'] == 'assistant' %}END{% endif %}"
TEMPLATE = TURNS + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
WITHOUT_THOUGHTS = "(m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'])"


def of_template(content: str = "m['content']", end: str = "<|end|>", whole: str = TEMPLATE):
    return template(whole.replace("CONTENT", content).replace("END", end))


def many_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(folder)


def pad_is_end(folder: Path) -> None:
    change(folder, "tokenizer_config.json", pad_token="<|end|>")


TROUBLES = {
    "padding that is an end": (pad_is_end, "padding token", "note", "lengths"),
    "no end token": (without_ends, "end tokens", "wrong", "length limit"),
    "an answer's end that is no stop": (of_template(end="<|spare_0|>"), "end of turn", "wrong", "spare_0"),
    "an answer without an end": (of_template(end=""), "end of turn", "note", "no token"),
    "thoughts left out of history": (of_template(WITHOUT_THOUGHTS), "history", "note", "think"),
    "a prompt that opens no turn": (of_template(whole=TURNS + "{% endfor %}"), "answer's place", "wrong", "opens"),
    "two begin tokens": (of_template(whole=2 * "{{ bos_token }}" + TEMPLATE), "begin token", "note", "twice"),
    "no template": (template(None), "chat template", "note", "none"),
    "a template that cannot be run": (template("{{ nothing.at.all }}"), "chat template", "wrong", "cannot render"),
    "a token that the model does not know": (many_tokens, "vocabulary", "wrong", "273"),
}  # fmt: skip


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_trouble_of_text_is_named(tiny, trouble):
    spoil, label, verdict, word = TROUBLES[trouble]
    sound = by_label(of_model.text(of_model.renderer_of(tiny)))
    assert {verdict for verdict, _ in sound.values()} == {"ok"}
    if label == "chat template":  # a template that is not saved leaves the old one
        (tiny / "chat_template.jinja").unlink()
    spoil(tiny)
    found = by_label(of_model.text(of_model.renderer_of(tiny)))
    assert found[label][0] == verdict and word in found[label][1], found
    assert all(found[other][0] != "wrong" for other in found if other != label)


def test_a_head_that_is_not_what_the_config_says_is_wrong(tiny):
    policy = load_policy(tiny, known_to_fit=True)
    assert [each.verdict for each in of_model.tied(policy)] == ["ok"]
    head = policy.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone() * 1.5)
    [found] = of_model.tied(policy)
    assert found.verdict == "wrong" and "are two in memory" in found.text


def test_two_embeddings_stay_two():
    policy = load_policy(resolve("random:llama", {"tie_word_embeddings": False}), known_to_fit=True)
    [found] = of_model.tied(policy)
    assert found.verdict == "ok" and "two tensors" in found.text


def test_an_architecture_that_does_not_fit_ends_with_status_1(capsys):
    folder = resolve("random:mamba", {"hidden_size": 64})
    with pytest.raises(SystemExit) as ended:
        cli(["doctor", "--model", str(folder)])
    assert ended.value.code == 1 and "WRONG: architecture" in capsys.readouterr().out


def test_engine_and_learner_that_disagree_are_named_with_the_fault(tiny):
    policy = load_policy(tiny, known_to_fit=True)
    mode, rule, _ = of_model.numerics_of(policy, None)
    sides = of_model.Sides.of(tiny, policy, mode, rule)
    try:
        with torch.no_grad():
            policy.weights()["model.layers.0.mlp.up_proj.weight"].mul_(2.0)
        found = by_label(of_model.agreement(sides, of_model.renderer_of(tiny)))
    finally:
        sides.close()
    for temperature in ("0.5", "1", "2"):
        verdict, text = found[f"temperature {temperature}"]
        assert verdict == "wrong" and "missed_sync: model.layers.0.mlp.up_proj.weight" in text
    assert found["greedy"][0] == "wrong"


@pytest.mark.parametrize(
    "arguments",
    [["--model", "nowhere:x"], ["--numerics", "exact"], ["--model", "random:llama", "--numerics", "some"],
     ["--model", "random:llama", "--package", "numpy"]],
    ids=["an unknown kind", "numerics of no model", "unknown numerics", "packages of a model"],
)  # fmt: skip
def test_bad_input_has_status_2(arguments):
    with pytest.raises(SystemExit) as ended:
        cli(["doctor", *arguments])
    assert ended.value.code == 2
