"""Breakages of the rules of take-over, leases, limits, records and keys. Each names the scenarios of which at least one
must fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway import admission, app, custody, generation, generations, journal, sweep, transcript
from gateway.delivery import Delivery
from gateway.request import Request
from shared import records
from shared.errors import Reason
from shared.state import Store
from tests.sim.mutation import Patch, mutation, nothing, without


@mutation("take-over", "deltas_are_told_only_when_they_are_kept",
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


@mutation("take-over", "one_of_two_gateways_is_partitioned")
def an_owner_that_was_robbed_still_writes() -> list[Patch]:
    return [
        (custody, "_APPEND", without(custody._APPEND, "held[1] ~= ARGV[3]", "false")),
        (custody, "_HOLD", without(custody._HOLD, "held[1] ~= ARGV[3]", "false")),
    ]


@mutation("take-over", "a_live_owner_is_followed_and_not_robbed")
def a_live_owner_is_robbed() -> list[Patch]:
    return [
        (custody, "_TAKE_OVER", without(custody._TAKE_OVER, "tonumber(held[3]) > now", "false")),
        (custody, "_FOLLOW", without(custody._FOLLOW, "(rank < 3 and lease <= now) and 1 or 0", "1")),
    ]


@mutation("take-over", "a_gateway_dies_and_another_takes_over")
def a_lapsed_lease_is_never_taken_over() -> list[Patch]:
    return [(custody, "_FOLLOW", without(custody._FOLLOW, "(rank < 3 and lease <= now) and 1 or 0", "0"))]


@mutation(
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


@mutation("take-over", "a_robbed_owner_submits_nothing")
def attempts_are_not_raised_in_the_store() -> list[Patch]:
    async def raise_attempt(self: Any, stamp: Any) -> None:
        self.attempt = max(self.attempt, stamp[1])

    return [(journal.Journal, "raise_attempt", raise_attempt)]


@mutation("lease", "a_live_owner_whose_request_waits_is_not_robbed")
def leases_are_not_renewed() -> list[Patch]:
    async def renew(self: Any, journals: Any) -> None:
        """Nothing is renewed."""

    return [(journal.Journals, "_renew", renew)]


@mutation("drain", "a_gateway_drains_and_another_goes_on")
def a_draining_gateway_keeps_what_it_has() -> list[Patch]:
    async def let_go(self: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing is let go."""

    return [(journal.Journals, "let_go", let_go)]


@mutation("slow reader", "a_client_takes_nothing")
def a_client_that_takes_nothing_is_waited_for() -> list[Patch]:
    return [(Delivery, "check_reader", nothing)]


@mutation("slow reader", "a_client_takes_nothing")
def a_slow_reader_ends_its_resumable_request() -> list[Patch]:
    whole = generations.Generations._viewing

    @contextmanager
    def viewing(self: Any, head: Any, log: Any) -> Iterator[Any]:
        with whole(self, head, log) as made:
            own = self._journals.find(made.id)
            if own is not None:
                made.delivery.on_slow = lambda: (own.owner.cancel(Reason.SLOW_READER), made.on_stuck())
            yield made

    return [(generations.Generations, "_viewing", viewing)]


@mutation("sweep", "what_a_dead_gateway_left_is_swept")
def nothing_is_swept() -> list[Patch]:
    async def swept(self: Any) -> None:
        await self._custody.gone(self._gone_ms)

    return [(sweep.Sweeper, "sweep", swept)]


@mutation("sweep", "what_a_dead_gateway_left_is_swept")
def the_limits_of_what_is_swept_are_kept() -> list[Patch]:
    whole = admission.Admission.settle

    def settle(self: Any, tenant: str, request_id: str, used: int | None) -> None:
        if used is not None:
            whole(self, tenant, request_id, used)

    return [(admission.Admission, "settle", settle)]


@mutation("sweep", "a_parked_request_waits_for_its_window")
def what_is_parked_is_swept() -> list[Patch]:
    return [(custody, "_SWEEP", without(custody._SWEEP, "held[5] + held[6] > now", "false"))]


@mutation("sweep", "an_owner_that_stood_still_keeps_its_ordinary_requests")
def an_owner_is_gone_after_a_moment() -> list[Patch]:
    return [(custody, "_OWNERS", without(custody._OWNERS, "now - ARGV[3]", "now - 3000"))]


@mutation("limits", "reservations_go_back")
def a_reservation_is_credited_and_kept() -> list[Patch]:
    return [(admission, "SCRIPT", without(admission.SCRIPT, "redis.call('HDEL', key, 'l:' .. request)"))]


@mutation("limits", "an_expired_reservation_ends_in_the_next_admission")
def expired_reservations_are_kept() -> list[Patch]:
    return [(admission, "SCRIPT", without(admission.SCRIPT, "if now < expiry then", "if true then"))]


@mutation("records", "a_late_word_of_a_former_owner_changes_no_record")
def records_move_back() -> list[Patch]:
    script = without(records._TRANSITION, "r >= 3", "false")
    return [(records, "_TRANSITION", without(script, "epoch < e or", "false or"))]


@mutation("records", "a_store_that_comes_back_empty_hears_nothing_of_former_owners")
def a_former_owner_remembers_what_it_had() -> list[Patch]:
    whole = Request._end

    def end(self: Any, error: Any) -> None:
        live = self.parts.records._live
        held = live.get(self.id)
        whole(self, error)
        if isinstance(error, custody.OwnerMoved):
            live[self.id] = held

    return [(Request, "_end", end)]


@mutation("keys", "keys_outlive_a_store_that_comes_back_empty")
def keys_are_not_written_again() -> list[Patch]:
    whole = journal.Journal.claim

    async def claim(self: Any, again: bool = False) -> None:
        await whole(self)

    return [(journal.Journal, "claim", claim)]


@mutation("keys", "keys_outlive_a_store_that_comes_back_empty")
def keys_are_taken_at_once() -> list[Patch]:
    return [(generation, "_KEYS_S", 0.0)]


@mutation("keys", "a_gateway_starts_when_the_store_has_just_lost_everything")
def who_starts_after_a_loss_does_not_know_of_it() -> list[Patch]:
    whole = Store._read_birth

    async def read_birth(self: Any) -> tuple[str, int]:
        birth, ago_ms = await whole(self)
        saw = self._lost_at is not None or self.birth not in ("", birth)
        return birth, ago_ms if saw else -1

    return [(Store, "_read_birth", read_birth)]


@mutation("keys", "a_key_was_taken_while_its_owner_was_cut_off_from_a_store_that_forgot_it")
def a_key_may_lead_to_two_requests() -> list[Patch]:
    return [(custody, "_KEY", without(custody._KEY, "held and held ~= ARGV[1]", "false"))]


@mutation("store", "the_store_is_emptied_between_two_looks_at_it")
def what_is_missing_is_believed_to_be_gone() -> list[Patch]:
    async def look(self: Any) -> None:
        """The last look is good enough."""

    return [(Store, "look", look)]


@mutation("store", "a_resumable_stream_moves_while_the_store_is_away")
def readers_wait_for_the_store() -> list[Patch]:
    return [(journal.Journals, "_away", nothing)]


@mutation("records", "an_ordinary_request_is_written_three_times")
def a_record_is_written_with_every_run() -> list[Patch]:
    whole = generation.Generation.append

    def append(self: Any, run: Any) -> Any:
        self._write_record()
        return whole(self, run)

    return [(generation.Generation, "append", append)]


@mutation("drain", "an_ordinary_request_outlasts_the_drain_of_its_gateway")
def a_drain_waits_for_nobody() -> list[Patch]:
    whole = app._finish
    return [(app, "_finish", lambda core, grace_s: whole(core, 0.0))]


@mutation("store", "the_store_comes_back_with_what_it_had_a_moment_before")
def a_store_that_lost_a_moment_gets_what_comes_after_it() -> list[Patch]:
    lost = without(custody._APPEND, "entries < tonumber(ARGV[6])", "false")
    return [(custody, "_APPEND", lost)]


@mutation("store", "the_store_comes_back_with_less_than_was_told_and_without_the_owner",
          "a_follower_tells_what_its_owner_does_not_know_to_be_kept")  # fmt: skip
def what_is_not_known_yet_is_taken_for_another_text() -> list[Patch]:
    return [(transcript.Transcript, "short_of", lambda self, places: False)]


@mutation("store", "the_store_comes_back_with_less_than_was_told_and_without_the_owner")
def whoever_has_read_more_than_is_kept_waits_for_nobody() -> list[Patch]:
    async def succeed(self: Any) -> None:
        """Somebody else will."""

    return [(generations.Follower, "succeed", succeed)]


@mutation("store", "a_request_ends_and_then_the_store_is_emptied")
def what_is_over_is_nobodys() -> list[Patch]:
    return [(journal.Journals, "_restore_kept", nothing)]
