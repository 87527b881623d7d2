"""Who may import whom, and what an import may cost: the layout of the design as a table."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "nearpolicy"
BASE = frozenset(
    {"errors", "records", "roles", "settings", "machine", "visible", "bounded", "waits", "distant", "messages"}
)

ARROWS: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "distant": frozenset(),
    "records": frozenset({"distant"}),
    "machine": frozenset(),
    "settings": frozenset(),
    "visible": frozenset(),
    "waits": frozenset(),
    "bounded": frozenset({"errors", "machine"}),
    "roles": frozenset({"records"}),
    "messages": frozenset({"distant", "records"}),
    "recipe_keys": frozenset({"errors"}),
    # What roles are made of.
    "objectives": BASE,
    "models": BASE,
    "store": BASE,
    "telemetry": BASE | {"store"},  # the report reads runs
    "tasks": BASE | {"models.tokenizer", "verifier.config"},  # prompts are rendered; a task names its rewards
    # The roles: they never see each other.
    "generator": BASE | {"models"},
    "learner": BASE | {"models", "objectives"},
    # Learned rewards: models are loaded in their own process; labels are told apart the same way everywhere.
    "verifier": BASE
    | {f"models.{name}" for name in ("choices", "device", "heads", "label_tree", "loading", "tokenizer")},
    "environments": BASE,
    "rollout_queue": BASE,
    # What a digest is of, and how two sets of them are compared; which device that is, and when it is done.
    "sync": BASE | {"models.weights", "models.device"},
    # The loop and what stands around it.
    "pipeline": frozenset({"records", "roles", "telemetry.batch"}),
    "evaluate": BASE | {"store.schema"},
    "placement": frozenset({"settings"}),
    # and every */config.py, below
    "config": frozenset({"errors", "settings", "recipe_keys", "visible", "placement", "config"}),
    "launch": frozenset({"everything"}),
}
"""A folder or module of the package -> what it may import besides itself: a unit as a whole, or one module of it."""


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, module inside the package) of every import in a file, those inside functions and for types too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} line {node.lineno}: write imports in full, `from nearpolicy...`"
            names = [node.module] if node.module != "nearpolicy" else [f"nearpolicy.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from ((node.lineno, n.removeprefix("nearpolicy.")) for n in names if n.startswith("nearpolicy."))


def unit_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def may_import(unit: str, module: str) -> bool:
    allowed = ARROWS[unit]
    if "everything" in allowed or module.split(".")[0] == unit:
        return True
    if unit == "config" and module.endswith(".config"):
        return True
    return module in allowed or module.split(".")[0] in allowed


FILES = sorted(f for f in PACKAGE.rglob("*.py") if f not in (PACKAGE / "__init__.py", PACKAGE / "__main__.py"))


@pytest.mark.parametrize("unit", sorted({unit_of(file) for file in FILES}))
def test_imports_go_in_one_direction(unit):
    assert unit in ARROWS, (
        f"nearpolicy/{unit} is new: say in ARROWS (tests/test_imports.py) what it may import, and keep the layout in "
        "docs true"
    )
    wrong = [
        f"{file.relative_to(PACKAGE.parent)} line {line} imports nearpolicy.{module}"
        for file in FILES
        if unit_of(file) == unit
        for line, module in imports(file)
        if not may_import(unit, module)
    ]
    assert not wrong, (
        "\n".join(wrong)
        + f"\n`{unit}` may import {', '.join(sorted(ARROWS[unit])) or 'nothing of the package'}. Roles see one another "
        "as Protocols of nearpolicy.roles and are put together in nearpolicy.launch; a helper that needs a role "
        "belongs in that role's folder."
    )


def test_arrows_name_what_exists():
    assert set(ARROWS) == {unit_of(file) for file in FILES}


def test_nothing_below_imports_launch():
    for file in FILES:
        if unit_of(file) != "launch":
            assert not any(module.startswith("launch") for _, module in imports(file)), file


@pytest.mark.parametrize("file", sorted(PACKAGE.glob("*/__init__.py")), ids=lambda file: file.parent.name)
def test_folders_are_light_so_that_a_config_can_be_read_without_the_role(file):
    body = ast.parse(file.read_text(encoding="utf-8")).body
    assert all(isinstance(node, ast.Expr) for node in body), f"{file} should hold its docstring and nothing else"


def loaded_by(code: str, *modules: str) -> list[str]:
    """Which of ``modules`` a fresh interpreter has loaded after ``code``."""
    report = f"import sys\n{code}\nprint('loaded:', *[m for m in {modules!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()[-1].removeprefix("loaded:").split()


HEAVY = ("torch", "numpy", "pydantic", "transformers")


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_by("import nearpolicy", *HEAVY) == []


def shows_help(*command: str) -> str:
    return (
        "from nearpolicy.launch import cli\n"
        f"try: cli.run({[*command, '--help']})\n"
        "except SystemExit as end: assert end.code == 0, end.code"
    )


def test_help_loads_nothing_heavy():
    assert loaded_by(shows_help(), *HEAVY) == []


@pytest.mark.parametrize("command", [["verify"], ["verify", "math"], ["verify", "ifeval"]], ids=" ".join)
def test_help_of_a_command_loads_no_more_than_typer_itself(command):
    """typer reads any option, those of `nearpolicy` too, with pydantic."""
    assert loaded_by(shows_help(*command), *HEAVY) in ([], ["pydantic"])


@pytest.mark.parametrize(
    "module",
    ["nearpolicy.config", "nearpolicy.tasks.mixture", "nearpolicy.verifier.service", "nearpolicy.store.reader"],
)
def test_what_runs_before_the_models_does_not_load_torch(module):
    assert loaded_by(f"import {module}", "torch", "transformers") == []


def test_the_check_itself_sees_a_heavy_import():
    assert loaded_by("import numpy", *HEAVY) == ["numpy"]
