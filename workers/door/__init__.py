"""The door: everything of a worker that peers see, in front of an engine that knows only tokens.

`door.Door` is the state machine, free of sockets and tasks; `service` puts it on gRPC.
"""
