"""What a command says when it cannot do what was asked: one line, never a traceback."""

import grpc
from grpc_status import rpc_status

from shared.errors import TrunklineError, from_status


class CommandError(Exception):
    """Ends the command with exit code 1 and its text as the one line on stderr."""


def explain(error: grpc.RpcError) -> str:
    """One line from a failed call: reason, message, the fields at fault, and when to try again."""
    if not isinstance(error, grpc.Call):
        return str(error)
    status = rpc_status.from_call(error)
    known = from_status(status) if status else None
    return _sentence(known) if known else f"{error.code().name}: {error.details() or 'no details'}"


def _sentence(error: TrunklineError) -> str:
    untold = (violation for violation in error.violations if violation.description not in error.message)
    fields = "".join(f"; {violation.field}: {violation.description}" for violation in untold)
    retry = "" if error.retry_after_s is None else f"; try again in {error.retry_after_s:g} s"
    return f"{error.reason}: {error.message}{fields}{retry}"
