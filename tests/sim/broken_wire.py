"""Breakages of the wire's rules 1 to 15. Each names the scenarios of which at least one must fail."""

from __future__ import annotations

from typing import Any

from gateway import course, embedding, generation, link, links, transcript, transport, upstream
from gateway.attempt import Attempt
from gateway.request import Request
from gateway.transcript import Fit
from router import dispatcher, fleet, refusals
from shared import keys
from shared import wire as shared_wire
from shared.errors import Reason
from tests.sim.mutation import Patch, mutation, nothing
from workers import drain, worker
from workers.door import (
    admission,
    batch,
    delivery,
    engine_side,
    execution,
    fencing,
    hello,
    holdings,
    outlets,
    stream,
)  # fmt: skip
from workers.door import gateway_side as door_gateways


@mutation("1", "a_stop_string_ends_a_choice_at_its_worker")
def tokens_after_the_end_are_billed() -> list[Patch]:
    whole = transcript.Transcript.append

    def append(self: Any, run: Any) -> Fit:
        before = self.tokens
        fit = whole(self, run)
        if fit is not Fit.DIVERGED and self.tokens - before < len(run.ids):
            self.tokens = before + len(run.ids)  # as if all of them were in the transcript
        return fit

    return [(transcript.Transcript, "append", append)]


@mutation("2", "a_worker_is_killed_and_the_next_draws_other_tokens")
def a_later_attempt_forgets_what_was_emitted() -> list[Patch]:
    def progress(self: Any) -> list[Any]:
        return [transcript.worker_pb2.ChoiceProgress(index=choice.index) for choice in self._choices]

    return [(transcript.Transcript, "progress", progress)]


@mutation("2", "a_worker_is_killed_at_a_step")
def ended_choices_are_run_again() -> list[Patch]:
    whole = transcript.Transcript.progress

    def progress(self: Any) -> list[Any]:
        found = whole(self)
        for choice in found:
            choice.finish = 0
        return found

    return [(transcript.Transcript, "progress", progress)]


@mutation("2", "a_batch_is_duplicated")
def the_same_attempt_is_admitted_twice() -> list[Patch]:
    def answer(self: Any, sub: Any, arrived: float) -> Any:
        held = self._holdings.held.get(sub.request_id)
        if held is not None:
            self._holdings._forget(held)
        self._holdings.fences._marks.clear()
        return self._fresh(sub, arrived)

    return [(admission.Admission, "answer", answer)]


@mutation("2", "a_seed_is_drawn_once")
def every_attempt_draws_a_seed() -> list[Patch]:
    whole = generation.Generation.submission

    def submission(self: Any, stamp: Any) -> Any:
        request = whole(self, stamp)
        if not self.spec.sampling.HasField("seed"):
            request.submission.generate.sampling.seed = stamp[1]
            request.submission.spec_hash = shared_wire.spec_hash(request.submission)
        return request

    return [(generation.Generation, "submission", submission)]


@mutation("2", "an_end_travels_with_the_last_token")
def an_end_travels_alone() -> list[Patch]:
    whole = batch.Batch.choices

    def choices(self: Any, delivery_: Any) -> bool:
        held_back = {
            choice: choice.finish
            for choice, cursor in zip(delivery_.execution.choices, delivery_.cursors, strict=True)
            if choice.finish and cursor.sent < len(choice.tokens)
        }
        for choice in held_back:
            choice.finish = 0
        try:
            return whole(self, delivery_) and not held_back
        finally:
            for choice, finish in held_back.items():
                choice.finish = finish

    return [(batch.Batch, "choices", choices)]


@mutation("2", "a_worker_is_killed_while_it_embeds")
def a_later_attempt_goes_on_with_half_an_embedding() -> list[Patch]:
    return [(embedding.Embedding, "queued", Request.queued)]


@mutation("3", "a_batch_is_duplicated")
def stale_openings_are_not_cancelled() -> list[Patch]:
    def opened(self: Any, opened: Any) -> None:
        found = self._hub.attempts.get(opened.request_id)
        if found is not None and found.stamp == (opened.epoch, opened.attempt) and self._bind(found, opened.handle):
            return
        self._handles[opened.handle] = None

    return [(links.Link, "_open", opened)]


@mutation("3", "a_batch_is_duplicated_to_two_workers_that_draw_other_tokens")
def an_attempt_is_bound_to_whoever_opened_it_last() -> list[Patch]:
    whole = Attempt.opened

    def opened(self: Any, seat: Any, handle: int) -> bool:
        if self.bound:
            self.seat = seat
        return whole(self, seat, handle)

    return [(Attempt, "opened", opened)]


@mutation("3", "a_submit_fails_after_its_request_was_opened")
def what_a_submit_comes_to_counts_after_opened() -> list[Patch]:
    def refused(self: Any, attempt: Any, kind: Any, *, error: Any = None, message: str = "") -> None:
        attempt.end(kind, error=error, message=message)

    return [(upstream.Upstream, "_refused", refused)]


@mutation("4", "the_answer_of_a_batch_is_lost")
def an_unknown_outcome_is_dispatched_again() -> list[Patch]:
    def unknown(self: Any, item: Any, worker: Any, incarnation: int) -> None:
        self._put_back(item, "rejected")

    return [(dispatcher.Dispatcher, "_unknown", unknown)]


@mutation("4", "the_answer_of_a_submit_is_lost")
def the_transport_repeats_a_submit() -> list[Patch]:
    whole = transport.GrpcTransport.submit

    async def submit(self: Any, address: str, request: Any, timeout_s: float) -> Any:
        try:
            return await whole(self, address, request, timeout_s)
        except transport.PeerLost:
            return await whole(self, address, request, timeout_s)

    return [(transport.GrpcTransport, "submit", submit)]


@mutation("4", "a_worker_that_refused_is_left_alone_until_it_reports")
def a_worker_that_refused_is_asked_again_at_once() -> list[Patch]:
    whole = fleet.Worker.answered

    def answered(self: Any, seq: int, held: Any, *, refused: bool, draining: bool) -> None:
        whole(self, seq, held, refused=False, draining=draining)

    return [(fleet.Worker, "answered", answered)]


@mutation("4", "a_worker_that_refused_is_left_alone_until_it_reports")
def a_rejected_item_loses_its_attempt() -> list[Patch]:
    def put_back(self: Any, item: Any, outcome: str) -> None:
        self._fail(item, refusals.outcome_unknown(0))

    return [(dispatcher.Dispatcher, "_put_back", put_back)]


@mutation("5", "a_batch_is_delayed_past")
def what_has_ended_leaves_no_mark() -> list[Patch]:
    return [(fencing.Fences, "ended", nothing), (fencing.Fences, "saw", nothing)]


@mutation("5", "a_batch_comes_when_a_later_attempt_runs")
def an_earlier_attempt_is_not_fenced() -> list[Patch]:
    return [(holdings.Holdings, "highest", nothing)]


@mutation("5", "a_cancel_of_an_earlier_attempt_comes_late")
def a_cancel_acts_on_later_attempts_too() -> list[Patch]:
    whole = holdings.Holdings.cancel
    return [(holdings.Holdings, "cancel", lambda self, request_id, stamp: whole(self, request_id, (99, 99)))]


@mutation("5", "a_cancel_of_an_earlier_attempt_comes_late")
def a_cancel_of_what_is_not_known_is_a_fault() -> list[Patch]:
    whole = holdings.Holdings.cancel

    def cancel(self: Any, request_id: bytes, stamp: Any) -> bool:
        assert request_id in self.held, "no such request"
        return whole(self, request_id, stamp)

    return [(holdings.Holdings, "cancel", cancel)]


@mutation("6", "an_unopened_batch_of_a_dead_router_is_adopted_by_the_next_attempt")
def nothing_is_ever_adopted() -> list[Patch]:
    return [(execution.Execution, "adoptable", lambda self, sub: False)]


@mutation("6", "a_copy_that_drew_other_tokens_is_not_adopted")
def whatever_is_held_is_adopted() -> list[Patch]:
    return [(execution.Execution, "adoptable", lambda self, sub: True)]


@mutation("6", "a_former_owner_hears_that_it_is_fenced")
def a_former_owner_hears_nothing() -> list[Patch]:
    whole = outlets.Outlets.detach
    return [(outlets.Outlets, "detach", lambda self, delivery_, last_word=None: whole(self, delivery_))]


@mutation("7", "outputs_are_reset_at_a_message")
def a_new_stream_goes_on_where_the_old_one_was() -> list[Patch]:
    return [(delivery.Cursor, "rewind", nothing), (delivery.Cursor, "acknowledge", nothing)]


@mutation("7", "outputs_are_reset_at_a_message")
def a_broken_stream_drops_what_it_carried() -> list[Patch]:
    whole = door_gateways.GatewaySide.disconnect

    def disconnect(self: Any, stream_: Any) -> None:
        for each in list(stream_.outlet.deliveries.values()):
            self._holdings.drop(each)
        whole(self, stream_)

    return [(door_gateways.GatewaySide, "disconnect", disconnect)]


@mutation("7", "outputs_are_reset_at_a_message")
def hello_lists_nothing() -> list[Patch]:
    whole = links.Link._hello

    def empty(self: Any) -> Any:
        made = whole(self)
        del made.held[:]
        del made.pending[:]
        return made

    return [(links.Link, "_hello", empty)]


@mutation("7", "a_cancel_is_lost_with_its_stream")
def what_a_hello_leaves_out_goes_on() -> list[Patch]:
    whole = door_gateways.reconcile

    def reconcile(*args: Any) -> Any:
        done = whole(*args)
        done.drop.clear()
        return done

    return [(door_gateways, "reconcile", reconcile)]


@mutation("7", "a_gateway_comes_back_to_what_its_worker_has_dropped")
def a_worker_does_not_say_what_it_lacks() -> list[Patch]:
    return [(hello, "_gone", lambda listed, current: ())]


@mutation("7", "what_a_dead_gateway_ran_ends_with_the_grace")
def orphans_are_kept() -> list[Patch]:
    return [(outlets.Outlets, "orphans", lambda self: [])]


@mutation("8", "an_engine_dies_behind_a_living_door", "a_worker_drains")
def released_is_taken_for_the_end() -> list[Patch]:
    def released(self: Any, end: Any) -> Any:
        raise course._worker_lost()

    return [(course.Course, "_released", released)]


@mutation("8", "a_cancel_is_confirmed_when_the_engine_has_let_go")
def a_cancel_is_confirmed_at_once() -> list[Patch]:
    async def gone(self: Any, within_s: float) -> bool:
        return True

    return [(Request, "gone", gone)]


@mutation("9", "a_stop_string_ends_a_choice_at_its_worker")
def a_worker_is_not_told_of_a_stop() -> list[Patch]:
    return [(Attempt, "_tell_stops", nothing)]


@mutation("9", "a_stop_string_ends_a_choice_at_its_worker")
def a_worker_ignores_a_stop() -> list[Patch]:
    return [(holdings.Holdings, "stop", nothing)]


@mutation("9", "a_stop_string_comes_with_the_end_of_its_choice")
def an_end_wins_over_an_earlier_stop() -> list[Patch]:
    whole = transcript._Choice._advance_to_match

    def advance(self: Any) -> bool:
        return self._advance_all() if self.finish else whole(self)

    return [(transcript._Choice, "_advance_to_match", advance)]


@mutation("10", "a_client_leaves_while_its_request_is_queued")
def a_router_keeps_what_nobody_waits_for() -> list[Patch]:
    return [(dispatcher.Dispatcher, "_left", nothing)]


@mutation("10", "a_cancel_overtakes_its_batch")
def a_router_forgets_to_cancel_a_late_admission() -> list[Patch]:
    return [(dispatcher.Dispatcher, "_cancel", nothing)]


@mutation("10", "a_deadline_passes")
def a_gateway_gives_no_budget() -> list[Patch]:
    return [(Request, "remaining_s", lambda self: 1e6)]


@mutation("11", "first_tokens_and_ends_are_told_at_once")
def first_tokens_are_flushed_late() -> list[Patch]:
    return [(stream, "FLUSH_S", 0.2), (stream.Stream, "mark", _lazy_mark)]


def _lazy_mark(self: Any, delivery_: Any, urgent: bool = False) -> None:
    if not self._dirty:
        self._wake()
    self._dirty[delivery_] = None


@mutation("11", "tokens_of_many_steps_travel_together")
def every_step_is_told_at_once() -> list[Patch]:
    return [(stream, "FLUSH_S", 0.0)]


@mutation("12", "a_machine_sleeps_and_nobody_blames_anybody", "a_process_is_stopped")
def a_process_that_was_stopped_blames_its_peers() -> list[Patch]:
    return [(shared_wire.LoopLag, "lag_s", lambda self: 0.0)]


@mutation("12", "a_machine_goes")
def silence_is_never_noticed() -> list[Patch]:
    whole = shared_wire.Liveness.judge

    def judge(self: Any, loop_lag_s: float = 0.0) -> Any:
        self._heard_at = self._clock.monotonic()
        return whole(self, loop_lag_s)

    return [(shared_wire.Liveness, "judge", judge)]


@mutation("12", "outputs_are_reset_at_a_message")
def a_lost_stream_is_a_lost_worker() -> list[Patch]:
    async def broke(self: Any, lost: Any) -> None:
        self._liveness.refused()

    return [(links.Link, "_broke", broke)]


@mutation("12", "a_process_is_stopped")
def an_engine_that_stands_still_is_waited_for() -> list[Patch]:
    never = lambda **_: False  # noqa: E731
    return [(engine_side, "engine_stalled", never), (link, "engine_stalled", never)]


@mutation("12", "a_suspect_gets_no_new_work")
def nobody_is_suspect() -> list[Patch]:
    whole = shared_wire.Liveness.judge

    def judge(self: Any, loop_lag_s: float = 0.0) -> Any:
        found = whole(self, loop_lag_s)
        return shared_wire.PeerState.ALIVE if found is shared_wire.PeerState.SUSPECT else found

    return [(shared_wire.Liveness, "judge", judge)]


@mutation("12", "a_worker_that_is_not_reached_again_is_lost_in_a_second")
def a_broken_stream_is_a_silent_one() -> list[Patch]:
    return [(shared_wire.Liveness, "broke", nothing)]


@mutation("12", "streams_that_nobody_needs_are_closed")
def streams_are_kept_for_ever() -> list[Patch]:
    return [(link.Link, "_wanted", lambda self: True)]


@mutation("13", "a_request_that_ends_its_workers_is_given_up")
def a_request_may_end_any_number_of_workers() -> list[Patch]:
    return [(course.Course, "_count_loss", nothing)]


@mutation("13", "moves_have_a_budget")
def moves_have_no_budget() -> list[Patch]:
    return [(course.MoveBudget, "take", lambda self: True)]


@mutation("13", "the_last_replica_drains_by_finishing")
def the_last_replica_releases() -> list[Patch]:
    async def alone(self: Any) -> bool:
        return False

    return [(drain.Drain, "_alone", alone)]


@mutation("14", "an_older_worker_is_given_a_feature_it_does_not_have")
def a_worker_ignores_features_it_does_not_know() -> list[Patch]:
    def mismatch(sub: Any, served: Any) -> None:
        return None

    return [(admission, "mismatch", mismatch)]


@mutation("14", "a_version_goes")
def a_version_that_is_gone_is_the_end() -> list[Patch]:
    def refused(self: Any, end: Any) -> Any:
        raise end.error

    return [(course.Course, "_refused", refused)]


@mutation("14", "a_version_goes")
def a_version_is_changed_in_mid_text() -> list[Patch]:
    whole = course.Course._refused

    def refused(self: Any, end: Any) -> Any:
        return course.Again(0.0, renew=True) if end.error.reason is Reason.VERSION_GONE else whole(self, end)

    return [(course.Course, "_refused", refused)]


@mutation("15", "tenants_do_not_share_a_cache")
def tenants_share_a_cache() -> list[Patch]:
    whole = shared_wire.cache_scope
    return [(shared_wire, "cache_scope", lambda **fields: whole(**fields | {"share_group": ""}))]


@mutation("identities", "two_tenants_use_one_client_id")
def a_clients_id_is_looked_up_in_all_tenants() -> list[Patch]:
    return [(keys, "alias", lambda tenant, client_id: f"tl:alias:{{x}}:{client_id}")]


@mutation("identities", "an_engine_dies_behind_a_living_door")
def an_engine_that_was_started_anew_is_the_same_incarnation() -> list[Patch]:
    return [(worker, "new_incarnation", lambda rng: 42)]
