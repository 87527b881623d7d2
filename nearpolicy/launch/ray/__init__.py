"""The runtime on Ray: every role in a process of its own, on one machine or on a cluster.

cluster     connection, room, actors             runtime     the roles of one run, as the session wants them
hosts       what runs inside an actor            learner     ranks of the learner, as one place
calls       questions and answers in bunches     generators, verifiers     members and pools as one role
record      the writer of the run's store
controller  the session itself in an actor
"""
