"""The verifier: judges completions, and never turns a failure of its own into a number."""
