"""Groups between environments and learner: staleness arithmetic (`ledger`), and the queue that waits on it."""
