"""What a command says when it cannot do what was asked: one line, never a traceback."""

from typing import Final

import grpc
from grpc_status import rpc_status

from shared.errors import TrunklineError, from_status

START_ONE: Final = "`make up` starts one"


class CommandError(Exception):
    """Ends the command with exit code 1 and its text as the one line on stderr."""


def unanswered(address: str) -> str:
    """Nobody is there."""
    return f"no gateway answers at {address}; is a mesh up? ({START_ONE})"


def explain(error: grpc.RpcError, address: str) -> str:
    """One line from a failed call to `address`: reason, message, the fields at fault, and when to try again."""
    if not isinstance(error, grpc.Call):
        return str(error)
    status = rpc_status.from_call(error)
    known = from_status(status) if status else None
    if known:
        return _sentence(known)
    if error.code() is grpc.StatusCode.UNAVAILABLE:  # the transport says so: a gateway would have said why
        return unanswered(address)
    return f"{error.code().name}: {error.details() or 'no details'}"


def _sentence(error: TrunklineError) -> str:
    untold = (violation for violation in error.violations if violation.description not in error.message)
    fields = "".join(f"; {violation.field}: {violation.description}" for violation in untold)
    retry = "" if error.retry_after_s is None else f"; try again in {error.retry_after_s:g} s"
    return f"{error.reason}: {error.message}{fields}{retry}"
