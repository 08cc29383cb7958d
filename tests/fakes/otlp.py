"""A real OTLP/gRPC receiver on a loopback port that keeps the spans it gets."""

from __future__ import annotations

import threading
from concurrent import futures
from types import TracebackType

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Threaded, because exporters send from threads. `endpoint` is host:port."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._spans: list[tuple[str, trace_pb2.Span]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._arrived:
            for resource in request.resource_spans:
                service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
                self._spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, count: int = 0, timeout_s: float = 10.0) -> list[tuple[str, trace_pb2.Span]]:
        """(service name, span) of everything received, once there are `count` of them."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self._spans) >= count, timeout_s), (
                f"{len(self._spans)} of {count} spans came: {[span.name for _, span in self._spans]}"
            )
            return list(self._spans)

    def close(self) -> None:
        """Stop receiving."""
        self._server.stop(None).wait()

    def __enter__(self) -> OtlpReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
