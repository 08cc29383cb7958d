"""Answers a submission: admitted, rejected, mismatch or fenced, from what the door itself knows.

Owns the order of the questions. The one rule: nothing is awaited between the questions and the reservation, and after
Admitted there is no way back to a refusal.
"""

from __future__ import annotations

from shared.clock import Clock
from trunkline.worker.v1 import worker_pb2
from workers.door import events
from workers.door.delivery import Cursor, Delivery
from workers.door.execution import Execution, Times
from workers.door.holdings import Holdings
from workers.door.intake import Flaw, Intake, malformed, mismatch, prepare
from workers.door.load import Loads
from workers.engine import messages as m

Result = worker_pb2.ItemResult


class Admission:
    """See the module. `draining` refuses what is new; what is held may still be adopted."""

    def __init__(self, holdings: Holdings, loads: Loads, clock: Clock) -> None:
        self.draining = False
        self._holdings = holdings
        self._loads = loads
        self._clock = clock

    def answer(self, sub: worker_pb2.Submission, arrived: float) -> Result:
        """Admits `sub` or says why not; `arrived`: when its batch came, seconds on the clock."""
        if (flaw := malformed(sub)) is not None:
            return _mismatch(flaw)
        stamp = (sub.epoch, sub.attempt)
        held = self._holdings.held.get(sub.request_id)
        if held is not None and held.stamp == stamp:
            return Result(admitted=worker_pb2.Admitted())
        if (highest := self._holdings.highest(sub.request_id, stamp)) is not None:
            return Result(fenced=worker_pb2.Fenced(epoch=highest[0], attempt=highest[1]))
        served = self._holdings.served
        flaw = mismatch(sub, served) if served is not None else None
        if held is not None and flaw is None and held.execution.adoptable(sub):
            return self._adopt(held, sub, arrived)
        if held is not None:
            self._holdings.drop(held, events.fenced_out(stamp))
        self._holdings.fences.saw(sub.request_id, stamp)
        return _mismatch(flaw) if flaw is not None else self._fresh(sub, arrived)

    def _fresh(self, sub: worker_pb2.Submission, arrived: float) -> Result:
        served = self._holdings.served
        if self.draining or served is None:
            return self._rejected("it is draining" if self.draining else "no engine is ready")
        intake = prepare(sub, self._holdings.next_key(), served)
        if isinstance(intake, Flaw):
            return _mismatch(intake)
        if (full := self._holdings.ledger.fits(intake.need)) is not None:
            return self._rejected(full)
        self._admit(sub, intake, arrived)
        return Result(admitted=worker_pb2.Admitted())

    def _admit(self, sub: worker_pb2.Submission, intake: Intake, arrived: float) -> None:
        execution = self._execution(sub, intake)
        given = {choice.index: choice for choice in sub.generate.choices}
        cursors = [
            Cursor(choice, choice.produced, finished=bool(given[index].finish))
            for index, choice in enumerate(intake.choices)
        ]
        if intake.bulk is not None:
            cursors = [Cursor(intake.bulk, 0)]
        delivery = self._delivery(execution, sub, cursors, arrived)
        self._holdings.admit(delivery, intake.work)

    def _adopt(self, held: Delivery, sub: worker_pb2.Submission, arrived: float) -> Result:
        execution = held.execution
        execution.stamp = (sub.epoch, sub.attempt)
        cursors = [self._adopted_cursor(execution, given) for given in sorted(sub.generate.choices, key=_index)]
        if execution.bulk is not None:
            cursors = [Cursor(execution.bulk, 0)]
        delivery = self._delivery(execution, sub, cursors, arrived)
        if execution.scheduled is not None:
            delivery.news.append(events.scheduled(execution.scheduled))
        self._holdings.replace(held, delivery)
        return Result(admitted=worker_pb2.Admitted(adopted=True))

    def _adopted_cursor(self, execution: Execution, given: worker_pb2.ChoiceProgress) -> Cursor:
        choice = execution.choices[given.index]
        if not given.finish:
            return Cursor(choice, len(given.emitted))
        if not choice.finish:
            choice.cut(len(given.emitted))
            self._holdings.tell(m.StopChoice(execution.key, given.index))
        return Cursor(choice, choice.produced, finished=True)

    def _execution(self, sub: worker_pb2.Submission, intake: Intake) -> Execution:
        lane = worker_pb2.LANE_BULK if intake.bulk is not None else worker_pb2.LANE_TOKENS
        return Execution(
            request_id=sub.request_id,
            stamp=(sub.epoch, sub.attempt),
            key=intake.work.key if intake.work is not None else 0,
            spec_hash=sub.spec_hash,
            lane=lane,
            need=intake.need,
            choices=intake.choices,
            bulk=intake.bulk,
            logprobs=intake.logprobs,
            traceparent=sub.traceparent,
            tracestate=sub.tracestate,
            times=Times(admitted=self._clock.monotonic()),
            live=intake.work is not None,
            ending=events.finished(m.Finished(0, 0, 0, 0, 0, 0, 0)) if intake.work is None else None,
        )

    def _delivery(
        self, execution: Execution, sub: worker_pb2.Submission, cursors: list[Cursor], arrived: float
    ) -> Delivery:
        outlet = self._holdings.outlets.outlet(sub.gateway_id, sub.gateway_incarnation, execution.lane)
        return Delivery(execution, cursors, outlet, (self._clock.monotonic() - arrived) * 1e3)

    def _rejected(self, message: str) -> Result:
        load = self._loads.current()
        return Result(rejected=worker_pb2.Rejected(load=load, message=message, draining=self.draining))


def _index(choice: worker_pb2.ChoiceProgress) -> int:
    return choice.index


def _mismatch(flaw: Flaw) -> Result:
    return Result(mismatch=worker_pb2.Mismatch(what=flaw.what, message=flaw.message))
