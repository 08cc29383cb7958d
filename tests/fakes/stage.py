"""A stand-in for any stage's process: reads the configuration a mesh gives it and answers /ready on its port.

The gateway's also streams a canned answer over gRPC and writes its span to the store. A stage whose configuration
holds `"model": {"name": "refuses"}` ends as a stage does that cannot start.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import redis
import yaml

from shared import keys
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2, inference_pb2_grpc

TRACE = "cd" * 16
ANSWER = "It is Paris."


class Ready(BaseHTTPRequestHandler):
    """Answers 200 to everything."""

    def do_GET(self) -> None:
        """Ready."""
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing to say."""


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """One answer for every prompt."""

    def __init__(self, store: redis.Redis) -> None:
        self._store = store

    def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Any:
        """Streams the answer and leaves a span behind."""
        now = time.time_ns() // 1000
        span = {
            "name": "chat",
            "service": "gateway-1",
            "role": "gateway",
            "span_id": "1",
            "start_us": now,
            "end_us": now + 1000,
            "attrs": {"trunkline.receipt.total_ms": 1.0},
        }
        self._store.rpush(keys.trace(TRACE), json.dumps(span))
        yield inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="ab" * 16, trace_id=TRACE))
        yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=ANSWER))
        yield inference_pb2.GenerateResponse(
            finished=inference_pb2.Finished(receipt=common_pb2.Receipt(total_ms=1.0, unattributed_ms=0.5))
        )


def main(role: str) -> None:
    """Serves until SIGTERM."""
    config = yaml.safe_load(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    if config.get("model", {}).get("name") == "refuses":
        sys.exit("not enough memory: 900 MiB are needed")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    if role == "gateway":
        server = grpc.server(ThreadPoolExecutor(2))
        servicer = Inference(redis.Redis.from_url(config["redis_url"]))  # type: ignore[abstract]
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        server.add_insecure_port(config["grpc_listen"])
        server.start()
    host, port = config["http_listen" if role == "gateway" else "ops_listen"].split(":")
    threading.Thread(target=HTTPServer((host, int(port)), Ready).serve_forever, daemon=True).start()
    ended.wait()
