"""Commands end with an exit code and one line, never a traceback; what a mesh refuses is told in its own words."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_status import rpc_status

from shared.errors import Reason, TrunklineError, Violation, to_status
from trunkctl.main import run
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2, inference_pb2_grpc

COMMANDS = [
    "",
    "mesh",
    "mesh up",
    "mesh down",
    "mesh status",
    "model",
    "generate",
    "chat",
    "trace",
    "request get",
    "request cancel",
    "keys create",
    "keys list",
    "keys revoke",
]
REFUSAL = TrunklineError(
    Reason.BAD_FIELD,
    "two fields are not valid",
    violations=[Violation("max_tokens", "must be at least 1"), Violation("n", "must be at most 16")],
)
BRACKETED = TrunklineError(
    Reason.BAD_FIELD,
    "a field is not valid",
    violations=[Violation("chat.messages[0].content", "[/INST] is not allowed")],
)
UNKNOWN = TrunklineError(Reason.REQUEST_UNKNOWN, "no such request")
LIMITED = TrunklineError(Reason.RPM, "too many requests", retry_after_s=1.5)


class Gateway(inference_pb2_grpc.InferenceServiceServicer):
    """Answers as a gateway does, with one canned outcome per model."""

    def ListModels(self, request, context):  # type: ignore[no-untyped-def]
        if dict(context.invocation_metadata()).get("authorization") != "Bearer good":
            context.abort_with_status(
                rpc_status.to_status(to_status(TrunklineError(Reason.KEY_UNKNOWN, "unknown key")))
            )
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="echo")])

    def Generate(self, request, context):  # type: ignore[no-untyped-def]
        errors = {"bad": REFUSAL, "limited": LIMITED, "bracketed": BRACKETED}
        if request.spec.model in errors:
            context.abort_with_status(rpc_status.to_status(to_status(errors[request.spec.model])))
        yield inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="ab" * 16))
        yield inference_pb2.GenerateResponse(heartbeat=inference_pb2.Heartbeat())
        for piece in (request.spec.prompt, *(message.content for message in request.spec.chat.messages)):
            yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=piece))
        usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=2)
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished(usage=usage))

    def GetGeneration(self, request, context):  # type: ignore[no-untyped-def]
        if request.WhichOneof("key") == "client_request_id":
            context.abort_with_status(rpc_status.to_status(to_status(UNKNOWN)))
        usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=2)
        return inference_pb2.GetGenerationResponse(
            record=common_pb2.RequestRecord(
                request_id=request.request_id,
                tenant="t",
                worker_id="worker-2",
                state=common_pb2.REQUEST_STATE_RUNNING,
                usage=usage,
            )
        )

    def CancelGeneration(self, request, context):  # type: ignore[no-untyped-def]
        state = common_pb2.REQUEST_STATE_CANCELLED
        return inference_pb2.CancelGenerationResponse(confirmed=request.request_id == "freed", state=state)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TRUNKLINE_API_KEY", "good")
    server = grpc.server(ThreadPoolExecutor(2))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Gateway(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([*command.split(), "--help"])
    assert ended.value.code == 0
    assert f"trunkctl {command}".strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        "mesh up --workers 0",
        "mesh up --http-port 65536",
        "generate x --max-tokens -1",
        "generate x --max-tokens 4294967296",
        "generate x --top-k 2147483648",
        "generate x --seed 18446744073709551616",
        "generate x --seed one",
        "generate x --temperature -0.5",
        "mesh up --timeout -1",
        "mesh roll --grace -1",
        "mesh roll --timeout nan",
        "mesh roll --pause inf",
        "keys create --tenant x --max-priority 101",
        "keys create --tenant x --expires-in-days -3",
        "keys create --tenant x --expires-in-days 1e400",
        "keys create --tenant x --expires-in-days nan",
        "keys create --tenant x --expires-in-days soon",
    ],
)
def test_wrong_usage_ends_with_2(command: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--home", str(tmp_path), *command.split()])
    assert ended.value.code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["bench", "mesh roll", "keys list", "generate hello"])
def test_an_option_that_a_command_does_not_have_is_told_with_its_own_usage(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run([*command.split(), "--foo"])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert err.startswith(f"usage: trunkctl {command.removesuffix(' hello')} ")
    assert "unrecognized arguments: --foo" in err


def test_text_that_is_not_utf8_is_told_in_one_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", b"\xff".decode(errors="surrogateescape"), "--address", address]) == 1
    assert capsys.readouterr() == ("", "trunkctl: the text is not valid UTF-8\n")


def test_generate_streams_the_text_alone_to_stdout(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hello", "--address", address]) == 0
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert "3 tokens in, 2 out" in err
    assert "ab" * 16 in err


def test_a_system_message_goes_before_the_users(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "you", "--system", "me", "--quiet", "--address", address]) == 0
    assert capsys.readouterr() == ("meyou\n", "")


def test_a_refusal_is_one_line_with_its_reason_and_every_field(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "x", "--model", "bad", "--address", address]) == 1
    assert capsys.readouterr().err == (
        "trunkctl: BAD_FIELD: two fields are not valid; max_tokens: must be at least 1; n: must be at most 16\n"
    )


def test_a_limit_tells_when_to_try_again(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "x", "--model", "limited", "--address", address]) == 1
    assert "RPM: too many requests; try again in 1.5 s" in capsys.readouterr().err


def test_a_key_file_goes_before_the_environment(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("other\n")
    assert run(["generate", "x", "--address", address, "--api-key-file", str(tmp_path / "key")]) == 1
    assert "KEY_UNKNOWN" in capsys.readouterr().err


def test_no_mesh_no_key_and_no_model_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRUNKLINE_API_KEY", raising=False)
    home = ["--home", str(tmp_path)]
    for command, word in (
        (["generate", "x"], "API key"),
        (["mesh", "up"], "model"),
        (["trace", "0"], "--redis-url"),
        (["trace", "0"], "make up"),
        (["mesh", "roll"], "make up"),
    ):
        assert run([*home, *command]) == 1
        err = capsys.readouterr().err
        assert word in err
        assert err.count("\n") == 1
    assert run([*home, "mesh", "down"]) == 0
    assert run([*home, "mesh", "status"]) == 1
    assert "make up" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        "generate x --model m --address 127.0.0.1:1",
        "chat --model m --address 127.0.0.1:1",
        "request get 0 --address 127.0.0.1:1",
        "bench --model m --address 127.0.0.1:1",
        "bench --protocol openai-http --address http://127.0.0.1:1",
    ],
)
def test_where_no_gateway_answers_its_address_is_told_and_what_starts_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRUNKLINE_API_KEY", "good")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    code = run(command.split())
    assert code == (0 if command.startswith("chat") else 1)  # a conversation goes on until its end
    said = f"no gateway answers at {command.split()[-1]}; is a mesh up? (`make up` starts one)\n"
    assert said in capsys.readouterr().err


def test_a_cancel_that_nobody_confirmed_ends_with_1(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["request", "cancel", "freed", "--address", address]) == 0
    assert run(["request", "cancel", "other", "--address", address]) == 1
    assert capsys.readouterr().out == "CANCELLED, freed\nCANCELLED, not confirmed\n"


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-"])
def test_a_request_is_found_by_the_id_that_its_answer_shows(
    prefix: str, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["request", "cancel", f"{prefix}freed", "--address", address]) == 0
    assert run(["request", "get", f"{prefix}{'ab' * 16}", "--address", address]) == 0
    assert f" {'ab' * 16}" in capsys.readouterr().out


def test_a_request_is_shown_as_a_table_or_as_json(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["request", "get", "ab" * 16, "--address", address]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("ab" * 16, "RUNNING", "worker-2", "3 in (0 cached), 2 out"))
    assert run(["request", "get", "ab" * 16, "--json", "--address", address]) == 0
    assert json.loads(capsys.readouterr().out)["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}
    assert run(["request", "get", "mine", "--client-id", "--address", address]) == 1
    assert capsys.readouterr().err == "trunkctl: REQUEST_UNKNOWN: no such request\n"


def test_a_conversation_carries_what_was_said_until_it_begins_anew(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/new\nthree\n/exit\nfour\n"))
    assert run(["chat", "--address", address]) == 0
    assert capsys.readouterr().out == "one" + "oneonetwo" + "three"


def test_a_refused_turn_is_told_as_it_is_and_taken_back(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert run(["chat", "--model", "bracketed", "--address", address]) == 0
    assert "chat.messages[0].content: [/INST] is not allowed" in capsys.readouterr().err


def test_a_reader_that_went_away_leaves_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trunkctl", "--home", str(tmp_path), "keys", "create", "--tenant", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.close()
        assert process.stderr
        assert process.stderr.read() == b""
