"""Held-out evaluation: what a score is (`metrics`), and asking the questions (`evaluator`)."""
