"""What an examination says: lines that are fine, lines worth knowing, and lines that say what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "info", "note", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line."""

    label: str
    verdict: Verdict
    """ok: as it should be. info: nothing to judge. note: a run is right, and may be slower or harder to read. wrong: a
    run would be wrong, or not be possible."""
    text: str


def ok(label: str, text: str) -> Finding:
    return Finding(label, "ok", text)


def info(label: str, text: str) -> Finding:
    return Finding(label, "info", text)


def note(label: str, text: str) -> Finding:
    return Finding(label, "note", text)


def wrong(label: str, text: str) -> Finding:
    return Finding(label, "wrong", text)


_STYLES = {"ok": ("ok", "green"), "info": ("", "dim"), "note": ("note", "yellow"), "wrong": ("WRONG", "bold red")}


def show(title: str, findings: Iterable[Finding]) -> list[Finding]:
    """Print them under a title as they come; returns them."""
    from rich.console import Console
    from rich.text import Text

    from nearpolicy.visible import visible

    console, shown = Console(highlight=False, soft_wrap=True), []
    console.print(Text(title, style="bold"))
    for finding in findings:
        word, style = _STYLES[finding.verdict]
        console.print(Text.assemble((f"  {finding.label:<22}", "dim"), (f"{word:<6}", style), visible(finding.text)))
        shown.append(finding)
    return shown
