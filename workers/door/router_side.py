"""The side of the door that faces routers: batches of submissions, and cancels whose batch is long answered.

Owns the echo of batch numbers. The one rule: a batch is echoed only after all its items were answered, when the load
already counts them.
"""

from __future__ import annotations

from collections import OrderedDict

from shared.clock import Clock
from shared.wire import Stamp
from trunkline.worker.v1 import worker_pb2
from workers.door.admission import Admission
from workers.door.holdings import Holdings, Observer
from workers.door.load import Loads

MAX_ROUTERS = 1024  # lives of routers remembered; the least recent goes first


class RouterSide:
    """See the module."""

    def __init__(
        self, holdings: Holdings, admission: Admission, loads: Loads, observer: Observer, clock: Clock
    ) -> None:
        self._holdings = holdings
        self._admission = admission
        self._loads = loads
        self._observer = observer
        self._clock = clock
        self._echoes: OrderedDict[int, int] = OrderedDict()  # router incarnation → highest batch

    def submit(self, batch: worker_pb2.SubmitBatchRequest) -> worker_pb2.SubmitBatchResponse:
        """Answers per item, in order."""
        arrived = self._clock.monotonic()
        results = [self._admission.answer(item, arrived) for item in batch.items]
        for result in results:
            self._observer.answered(result.WhichOneof("result") or "")
        router = batch.router_incarnation
        self._echoes[router] = max(batch.batch_seq, self._echoes.pop(router, 0))
        if len(self._echoes) > MAX_ROUTERS:
            self._echoes.popitem(last=False)
        self._loads.changed()
        return worker_pb2.SubmitBatchResponse(incarnation=self._holdings.incarnation, results=results)

    def echo(self, router_incarnation: int) -> int:
        """Highest batch of this router that the load counts."""
        return self._echoes.get(router_incarnation, 0)

    def cancel(self, request_id: bytes, stamp: Stamp) -> bool:
        """Ends what is held at ≤ `stamp`; False if there is nothing. Later submissions at ≤ `stamp` are refused."""
        known = self._holdings.cancel(request_id, stamp)
        self._loads.changed()
        return known
