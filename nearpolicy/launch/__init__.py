"""The command line, and what builds the real roles and hands them to the pipeline."""
