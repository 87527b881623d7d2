"""The token ledger: what became of every sampled token, and what a token that moved the weights has cost.

fates of all rollouts -> sampled = the sum of all but `replayed` -> metrics, the summary's table, the report
"""

from __future__ import annotations

from collections.abc import Mapping

from nearpolicy.records import Fate


def sampled_tokens(ledger: Mapping[Fate, int]) -> int:
    """All that was generated and stored: every token has one fate, and those trained once more are told of apart."""
    return sum(tokens for fate, tokens in ledger.items() if fate is not Fate.REPLAYED)


def ledger_metrics(ledger: Mapping[Fate, int]) -> dict[str, float]:
    """Totals so far."""
    found = {f"ledger/{fate.value}_tokens": float(tokens) for fate, tokens in ledger.items() if tokens}
    trained = ledger.get(Fate.TRAINED, 0)
    return found | ({"ledger/sampled_per_trained": sampled_tokens(ledger) / trained} if trained else {})


def ledger_table(ledger: Mapping[Fate, int], *, undone: int, lost_groups: int, seconds: float) -> list[str]:
    """Lines for the end of a run, the largest fate first; empty if nothing was sampled. ``undone``: trained tokens of
    steps that were rolled back. ``seconds``: of its steps."""
    sampled = sampled_tokens(ledger)
    if not sampled:
        return []
    fates = sorted((fate for fate in ledger if ledger[fate] and fate is not Fate.REPLAYED), key=lambda f: -ledger[f])
    width = max(len(f"{sampled:,}"), len("tokens"))
    lines = [f"{'fate':<14} {'tokens':>{width}}  share"]
    lines += [f"{_name(fate):<14} {ledger[fate]:>{width},} {ledger[fate] / sampled:>6.1%}" for fate in fates]
    lines.append(f"{'sampled':<14} {sampled:>{width},}")
    if again := ledger.get(Fate.REPLAYED, 0):
        lines.append(f"{'replayed':<14} {again:>{width},}  once more, in later steps")
    if undone:
        lines.append(f"{'undone':<14} {undone:>{width},}  of the trained ones, in steps that were rolled back")
    if lost_groups:
        plural = "attempt that was" if lost_groups == 1 else "attempts that were"
        lines.append(f"{'lost':<14} {'?':>{width}}  {lost_groups} {plural} under way when a process ended")
    if trained := ledger.get(Fate.TRAINED, 0) - undone:
        lines.append(
            f"a token that moved the weights cost {sampled / trained:.2f} sampled tokens and "
            f"{1000 * seconds / trained:.2f} ms of training"
        )
    return lines


def _name(fate: Fate) -> str:
    return fate.value.replace("_", " ")
