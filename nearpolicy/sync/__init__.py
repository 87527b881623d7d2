"""Verified weight publication."""
