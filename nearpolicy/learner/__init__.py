"""The learner: from a batch of rows to an optimizer step, in verbs that other methods reuse."""
