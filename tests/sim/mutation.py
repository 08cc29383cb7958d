"""How a rule is broken on purpose, and who must notice.

Owns the register of mutations. The one rule: a mutation breaks one rule in the real code, as a plausible mistake would,
and nothing in the simulation; one that no named scenario notices means that the rule is not proved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from shared.state import Script
from tests.sim.scenarios import SCENARIOS, play

Patch = tuple[Any, str, Any]


@dataclass(frozen=True)
class Mutation:
    """`rule`: the number of the wire's, or a word for what else is promised. `scenarios`: at least one of them must
    fail."""

    name: str
    rule: str
    patches: Callable[[], list[Patch]]
    scenarios: tuple[str, ...]

    @contextmanager
    def made(self) -> Iterator[None]:
        """The code is wrong inside the scope."""
        with ExitStack() as stack:
            for owner, name, value in self.patches():
                own = owner.__dict__[name]
                setattr(owner, name, value)
                stack.callback(setattr, owner, name, own)
            yield

    def noticed(self) -> Noticed | None:
        """By which scenario, and how; None if by none."""
        with self.made():
            for name in self.scenarios:
                for label, scene in SCENARIOS[name].items():
                    try:
                        play(scene)
                    except Exception as error:
                        return Noticed(f"{name} {label}".rstrip(), f"{type(error).__name__}: {str(error)[:120]}")
        return None


@dataclass(frozen=True)
class Noticed:
    """The scenario that failed, and what it said."""

    scenario: str
    how: str


MUTATIONS: list[Mutation] = []


def mutation(rule: str, *scenarios: str) -> Callable[[Callable[[], list[Patch]]], Any]:
    """Registers a function that gives patches as (owner, name, value)."""

    def register(patches: Callable[[], list[Patch]]) -> Any:
        MUTATIONS.append(Mutation(patches.__name__, rule, patches, scenarios))
        return patches

    return register


def nothing(*args: Any, **kwargs: Any) -> None:
    """In place of what should have been done."""


def without(script: Any, line: str, instead: str = "") -> Script:
    """A script in which `line` is missing, or says something else."""
    assert line in script.text, line
    return Script(script.text.replace(line, instead))
