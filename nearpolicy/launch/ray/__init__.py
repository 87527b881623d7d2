"""The runtime on Ray: every role in a process of its own, on one machine or on a cluster.

cluster     connection, room, actors             runtime     the roles of one run, as the session wants them
hosts       what runs inside an actor            learner     ranks of the learner, as one place
calls       questions and answers in bunches     generators, verifiers     members and pools as one role
record      the writer of the run's store        parcels     tokens on their way past the controller
controller  the session itself in an actor       used        what a step has made of the rows it was sent
"""
