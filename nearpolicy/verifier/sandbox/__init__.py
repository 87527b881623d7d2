"""Programs that nobody trusts, run and judged.

grading                  tests -> runs -> one of seven verdicts        outside, knows what is expected
ladder, probe            which isolation there is, tried by an attack
pool, zygotes, capture   workers, one run each; time, output           outside
worker, isolation,
syscalls, kernel         walls of a worker and of each run             inside, knows nothing
harness, values          what a run does, and what comes out of it
bubblewrap, remote       the same by other means
"""
