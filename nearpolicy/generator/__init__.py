"""The embedded engine: continuous batching over paged keys and values, with exact log-probabilities."""
