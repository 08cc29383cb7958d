"""Breakages of the wire's rules, made on purpose: each must make a named scenario fail.

Owns the list. The one rule: a mutation breaks one rule in the real code, as a plausible mistake would, and nothing in
the simulation; one that no scenario notices means that the rule is not proved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from gateway import course, custody, journal, link, links, transcript
from gateway.attempt import Attempt
from gateway.transcript import Fit
from router import dispatcher
from shared import wire
from shared.state import Script
from tests.sim.scenarios import SCENARIOS, play
from workers.door import delivery, engine_side, execution, fencing, holdings, stream
from workers.door import gateway_side as door_gateways

Patch = tuple[Any, str, Any]


@dataclass(frozen=True)
class Mutation:
    """`rule`: of the wire, or "take-over". `scenarios`: those of which at least one must fail."""

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

    def noticed(self) -> str:
        """By which scenario, and how; empty if by none."""
        with self.made():
            for name in self.scenarios:
                for label, scene in SCENARIOS[name].items():
                    try:
                        play(scene)
                    except Exception as error:
                        return f"{name} {label}: {type(error).__name__}: {str(error)[:120]}"
        return ""


MUTATIONS: list[Mutation] = []


def _mutation(rule: str, *scenarios: str) -> Callable[[Callable[[], list[Patch]]], Any]:
    def register(patches: Callable[[], list[Patch]]) -> Any:
        MUTATIONS.append(Mutation(patches.__name__, rule, patches, scenarios))
        return patches

    return register


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of what should have been done."""


@_mutation("1", "a_stop_string_ends_a_choice_at_its_worker")
def tokens_after_the_end_are_billed() -> list[Patch]:
    whole = transcript.Transcript.append

    def append(self: Any, run: Any) -> Fit:
        before = self.tokens
        fit = whole(self, run)
        if fit is not Fit.DIVERGED and self.tokens - before < len(run.ids):
            self.tokens = before + len(run.ids)  # as if all of them were in the transcript
        return fit

    return [(transcript.Transcript, "append", append)]


@_mutation("2", "a_worker_is_killed_and_the_next_draws_other_tokens")
def a_later_attempt_forgets_what_was_emitted() -> list[Patch]:
    def progress(self: Any) -> list[Any]:
        return [transcript.worker_pb2.ChoiceProgress(index=choice.index) for choice in self._choices]

    return [(transcript.Transcript, "progress", progress)]


@_mutation("2", "a_worker_is_killed_at_a_step")
def ended_choices_are_run_again() -> list[Patch]:
    whole = transcript.Transcript.progress

    def progress(self: Any) -> list[Any]:
        found = whole(self)
        for choice in found:
            choice.finish = 0
        return found

    return [(transcript.Transcript, "progress", progress)]


@_mutation("2", "a_batch_is_duplicated")
def the_same_attempt_is_admitted_twice() -> list[Patch]:
    from workers.door.admission import Admission

    def answer(self: Any, sub: Any, arrived: float) -> Any:
        held = self._holdings.held.get(sub.request_id)
        if held is not None:
            self._holdings._forget(held)
        self._holdings.fences._marks.clear()
        return self._fresh(sub, arrived)

    return [(Admission, "answer", answer)]


@_mutation("3", "a_batch_is_duplicated")
def stale_openings_are_not_cancelled() -> list[Patch]:
    def opened(self: Any, opened: Any) -> None:
        found = self._hub.attempts.get(opened.request_id)
        if found is not None and found.stamp == (opened.epoch, opened.attempt) and self._bind(found, opened.handle):
            return
        self._handles[opened.handle] = None

    return [(links.Link, "_open", opened)]


@_mutation("3", "a_batch_is_duplicated_to_two_workers_that_draw_other_tokens")
def an_attempt_is_bound_to_whoever_opened_it_last() -> list[Patch]:
    whole = Attempt.opened

    def opened(self: Any, seat: Any, handle: int) -> bool:
        if self.bound:
            self.seat = seat
        return whole(self, seat, handle)

    return [(Attempt, "opened", opened)]


@_mutation("4", "the_answer_of_a_batch_is_lost")
def an_unknown_outcome_is_dispatched_again() -> list[Patch]:
    def unknown(self: Any, item: Any, worker: Any, incarnation: int) -> None:
        self._put_back(item, "rejected")

    return [(dispatcher.Dispatcher, "_unknown", unknown)]


@_mutation("5", "a_batch_is_delayed_past")
def what_has_ended_leaves_no_mark() -> list[Patch]:
    return [(fencing.Fences, "ended", _nothing), (fencing.Fences, "saw", _nothing)]


@_mutation("6", "an_unopened_batch_of_a_dead_router_is_adopted_by_the_next_attempt")
def nothing_is_ever_adopted() -> list[Patch]:
    return [(execution.Execution, "adoptable", lambda self, sub: False)]


@_mutation("7", "outputs_are_reset_at_a_message")
def a_new_stream_goes_on_where_the_old_one_was() -> list[Patch]:
    return [(delivery.Cursor, "rewind", _nothing), (delivery.Cursor, "acknowledge", _nothing)]


@_mutation("7", "outputs_are_reset_at_a_message")
def a_broken_stream_drops_what_it_carried() -> list[Patch]:
    whole = door_gateways.GatewaySide.disconnect

    def disconnect(self: Any, stream_: Any) -> None:
        for each in list(stream_.outlet.deliveries.values()):
            self._holdings.drop(each)
        whole(self, stream_)

    return [(door_gateways.GatewaySide, "disconnect", disconnect)]


@_mutation("7", "outputs_are_reset_at_a_message")
def hello_lists_nothing() -> list[Patch]:
    whole = links.Link._hello

    def empty(self: Any) -> Any:
        made = whole(self)
        del made.held[:]
        del made.pending[:]
        return made

    return [(links.Link, "_hello", empty)]


@_mutation("8", "an_engine_dies_behind_a_living_door", "a_worker_drains")
def released_is_taken_for_the_end() -> list[Patch]:
    def released(self: Any, end: Any) -> Any:
        raise course._worker_lost()

    return [(course.Course, "_released", released)]


@_mutation("9", "a_stop_string_ends_a_choice_at_its_worker")
def a_worker_is_not_told_of_a_stop() -> list[Patch]:
    return [(Attempt, "_tell_stops", _nothing)]


@_mutation("9", "a_stop_string_ends_a_choice_at_its_worker")
def a_worker_ignores_a_stop() -> list[Patch]:
    return [(holdings.Holdings, "stop", _nothing)]


@_mutation("10", "a_client_leaves_while_its_request_is_queued")
def a_router_keeps_what_nobody_waits_for() -> list[Patch]:
    return [(dispatcher.Dispatcher, "_left", _nothing)]


@_mutation("10", "a_cancel_overtakes_its_batch")
def a_router_forgets_to_cancel_a_late_admission() -> list[Patch]:
    return [(dispatcher.Dispatcher, "_cancel", _nothing)]


@_mutation("10", "a_deadline_passes")
def a_gateway_gives_no_budget() -> list[Patch]:
    from gateway.request import Request

    return [(Request, "remaining_s", lambda self: 1e6)]


@_mutation("11", "first_tokens_and_ends_are_told_at_once")
def first_tokens_are_flushed_late() -> list[Patch]:
    return [(stream, "FLUSH_S", 0.2), (stream.Stream, "mark", _lazy_mark)]


def _lazy_mark(self: Any, delivery_: Any, urgent: bool = False) -> None:
    if not self._dirty:
        self._wake()
    self._dirty[delivery_] = None


@_mutation("12", "a_machine_sleeps_and_nobody_blames_anybody", "a_process_is_stopped")
def a_process_that_was_stopped_blames_its_peers() -> list[Patch]:
    return [(wire.LoopLag, "lag_s", lambda self: 0.0)]


@_mutation("12", "a_machine_goes")
def silence_is_never_noticed() -> list[Patch]:
    whole = wire.Liveness.judge

    def judge(self: Any, loop_lag_s: float = 0.0) -> Any:
        self._heard_at = self._clock.monotonic()
        return whole(self, loop_lag_s)

    return [(wire.Liveness, "judge", judge)]


@_mutation("12", "outputs_are_reset_at_a_message")
def a_lost_stream_is_a_lost_worker() -> list[Patch]:
    async def broke(self: Any, lost: Any) -> None:
        self._liveness.refused()

    return [(links.Link, "_broke", broke)]


@_mutation("12", "a_process_is_stopped")
def an_engine_that_stands_still_is_waited_for() -> list[Patch]:
    never = lambda **_: False  # noqa: E731
    return [(engine_side, "engine_stalled", never), (link, "engine_stalled", never)]


@_mutation("13", "a_request_that_ends_its_workers_is_given_up")
def a_request_may_end_any_number_of_workers() -> list[Patch]:
    return [(course.Course, "_count_loss", _nothing)]


@_mutation("14", "an_older_worker_is_given_a_feature_it_does_not_have")
def a_worker_ignores_features_it_does_not_know() -> list[Patch]:
    def mismatch(sub: Any, served: Any) -> None:
        return None

    from workers.door import admission

    return [(admission, "mismatch", mismatch)]


@_mutation("identities", "two_tenants_use_one_client_id")
def a_clients_id_is_looked_up_in_all_tenants() -> list[Patch]:
    from shared import keys

    return [(keys, "alias", lambda tenant, client_id: f"tl:alias:{{x}}:{client_id}")]


@_mutation("take-over", "deltas_are_told_only_when_they_are_kept",
           "gateway_and_worker_die_together_and_the_next_draws_other_tokens")  # fmt: skip
def a_delta_is_told_before_it_is_kept() -> list[Patch]:
    whole = journal.Journal.put

    def put(self: Any, run: Any) -> None:
        whole(self, run)
        self.log.add([run], None)

    def show(self: Any, batch: Any) -> None:
        add = self.log.add
        self.log.add = lambda new, ending=None: add([], ending)
        try:
            whole_show(self, batch)
        finally:
            del self.log.add

    whole_show = journal.Journal._show
    return [(journal.Journal, "put", put), (journal.Journal, "_show", show)]


def _without(script: Any, line: str, instead: str = "") -> Script:
    assert line in script.text, line
    return Script(script.text.replace(line, instead))


@_mutation("take-over", "one_of_two_gateways_is_partitioned")
def an_owner_that_was_robbed_still_writes() -> list[Patch]:
    return [
        (custody, "_APPEND", _without(custody._APPEND, "held[1] ~= ARGV[3]", "false")),
        (custody, "_HOLD", _without(custody._HOLD, "held[1] ~= ARGV[3]", "false")),
    ]


@_mutation("take-over", "a_live_owner_is_followed_and_not_robbed")
def a_live_owner_is_robbed() -> list[Patch]:
    return [
        (custody, "_TAKE_OVER", _without(custody._TAKE_OVER, "tonumber(held[3]) > now", "false")),
        (custody, "_FOLLOW", _without(custody._FOLLOW, "(rank < 3 and lease <= now) and 1 or 0", "1")),
    ]


@_mutation("take-over", "a_gateway_dies_and_another_takes_over")
def a_lapsed_lease_is_never_taken_over() -> list[Patch]:
    return [(custody, "_FOLLOW", _without(custody._FOLLOW, "(rank < 3 and lease <= now) and 1 or 0", "0"))]


@_mutation(
    "take-over", "a_live_owner_is_followed_and_not_robbed", "one_of_two_gateways_is_partitioned"
)  # fmt: skip
def a_cursor_is_not_checked() -> list[Patch]:
    def skip(self: Any, places: Any, runs: Any) -> None:
        for run in runs:
            self.append(run)
        for choice in self._choices:
            self._advance(choice)
            choice.take(self._tokenizer)

    return [(transcript.Transcript, "skip", skip)]


def main() -> int:
    """Make each mutation; report who noticed. 1 if one was not noticed."""
    missed = 0
    for mutation in MUTATIONS:
        noticed = mutation.noticed()
        missed += not noticed
        print(f"rule {mutation.rule}: {mutation.name}: {noticed or 'NOBODY NOTICED'}", flush=True)
    print(f"{len(MUTATIONS)} mutations, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
