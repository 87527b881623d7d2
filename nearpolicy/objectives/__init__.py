"""Objectives: pure functions of rewards and log-probabilities. No process group, no model, one idea per function."""
