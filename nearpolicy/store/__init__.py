"""The durable record of a run: one writer, any number of readers, one SQLite file in the run folder."""
