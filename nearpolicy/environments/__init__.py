"""Environments: from an admission to a group."""
