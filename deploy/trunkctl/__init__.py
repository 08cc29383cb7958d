"""trunkctl: runs a mesh on this machine, and talks to any mesh through its public API.

One module per command group; each offers `add_parser(subparsers)` and sets `run`, a function from the parsed
arguments to an exit code. Nothing here is imported by the stages.
"""
