"""Models: loading, weight names and fingerprints, the root module, and the one attention function."""
