"""What must hold of hashes for any request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.wire import prefix_hashes, spec_hash
from trunkline.worker.v1 import worker_pb2

ids = st.lists(st.integers(0, 49151), max_size=80)
u32 = st.integers(0, 2**32 - 1)


@st.composite
def submissions(draw: st.DrawFn) -> worker_pb2.Submission:
    sub = worker_pb2.Submission(artefact_hash=draw(st.sampled_from(["", "aa", "bb"])))
    sub.adapter_hash = draw(st.sampled_from(["", "aa", "bb"]))
    work = sub.generate
    work.prompt.extend(draw(ids))
    for index in range(draw(st.integers(1, 3))):
        work.choices.add(index=index)
    work.max_tokens, work.min_tokens = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    work.stop_token_ids.extend(draw(st.lists(st.integers(0, 3), max_size=3)))
    work.ignore_eos = draw(st.booleans())
    if draw(st.booleans()):
        work.sampling.temperature = draw(st.sampled_from([0.0, 0.5, 1.0]))
    if draw(st.booleans()):
        work.sampling.seed = draw(st.sampled_from([0, 1, 2**64 - 1]))
    if draw(st.booleans()):
        work.sampling.logit_bias.update(draw(st.dictionaries(st.integers(0, 3), st.sampled_from([-1.0, 1.0]))))
    return sub


def visible(sub: worker_pb2.Submission) -> tuple[object, ...]:
    """What the hash names, as a value to compare."""
    work = sub.generate
    sampling = work.sampling
    return (
        sub.artefact_hash, sub.adapter_hash, tuple(work.prompt), len(work.choices), work.max_tokens, work.min_tokens,
        tuple(work.stop_token_ids), work.ignore_eos, tuple(sorted(sampling.logit_bias.items())),
        work.HasField("sampling"),
        sampling.temperature if sampling.HasField("temperature") else None,
        sampling.seed if sampling.HasField("seed") else None,
    )  # fmt: skip


@given(submissions(), submissions())
def test_spec_hashes_are_equal_exactly_when_what_changes_tokens_is(
    one: worker_pb2.Submission, other: worker_pb2.Submission
) -> None:
    assert (spec_hash(one) == spec_hash(other)) == (visible(one) == visible(other))


@given(submissions(), ids, st.binary(max_size=16), st.integers(1, 9), u32, st.text(max_size=5))
def test_later_attempts_have_the_spec_hash_of_the_first(
    sub: worker_pb2.Submission, emitted: list[int], request_id: bytes, attempt: int, budget: int, trace: str
) -> None:
    before = spec_hash(sub)
    later = worker_pb2.Submission()
    later.CopyFrom(sub)
    later.request_id, later.epoch, later.attempt, later.budget_ms = request_id, attempt, attempt, budget
    later.priority, later.traceparent, later.gateway_id = attempt, trace, trace
    later.generate.choices[0].emitted.extend(emitted)
    later.generate.choices[0].finish = 1
    reordered = [later.generate.choices.pop() for _ in range(len(later.generate.choices))]
    later.generate.choices.extend(reordered)
    assert spec_hash(later) == before


@given(submissions())
def test_a_hash_survives_the_wire(sub: worker_pb2.Submission) -> None:
    assert spec_hash(worker_pb2.Submission.FromString(sub.SerializeToString())) == spec_hash(sub)


@given(st.binary(min_size=32, max_size=32), ids, ids)
def test_common_blocks_and_only_those_have_common_hashes(scope: bytes, one: list[int], other: list[int]) -> None:
    joined = one + other
    mine, theirs = prefix_hashes(scope, one), prefix_hashes(scope, joined)
    assert theirs[: len(mine)] == mine
    blocks = {tuple(joined[: 16 * (i + 1)]) for i in range(len(theirs))}
    assert len(set(theirs)) == len(theirs) == len(blocks)
