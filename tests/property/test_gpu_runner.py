"""The GPU runner, on a device that is the CPU, says what the plain one says: arenas, graphs, pending tokens, draws."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fakes.engine_rig import Rig
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.host_device import HostDevice, Trimmed
from tests.property.test_overlap import Job, Machine, play, scenes
from workers.engine import messages as m
from workers.engine.gpu_runner import GpuRunner
from workers.engine.scheduler import Limits


def runner(blocks: int, batch_tokens: int, seqs: int, device: HostDevice) -> GpuRunner:
    limits = Limits(batch_tokens, seqs, 64, 512)
    made = GpuRunner(Trimmed(HashModel()), HashModel.cache(blocks), limits, VOCAB, device)
    made.record()
    return made


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenes())
def test_streams_are_those_of_the_plain_runner(scene: tuple[Machine, list[Job]]) -> None:
    machine, jobs = scene
    device = HostDevice()
    ours = runner(machine.blocks, machine.batch_tokens, machine.seqs, device)
    plain, gpu = play(machine, jobs, overlap=False), play(machine, jobs, overlap=True, runner=ours)
    for job in jobs:
        key = job.work.key
        ends = plain.notes.ended[key], gpu.notes.ended[key]
        assert type(ends[0]) is type(ends[1])
        if isinstance(job.work, m.Encode):
            for index, vector in plain.notes.vectors[key].items():
                assert gpu.notes.vectors[key][index].data == vector.data
        elif isinstance(ends[0], m.Finished) or len(job.work.choices) == 1:
            for choice in range(len(job.work.choices)):
                _same(plain, gpu, (key, choice), whole=isinstance(ends[0], m.Finished))


def _same(plain: Rig, gpu: Rig, where: tuple[int, int], *, whole: bool) -> None:
    one, other = plain.notes.tokens[where], gpu.notes.tokens[where]
    count = max(len(one), len(other)) if whole else min(len(one), len(other))
    assert other[:count] == one[:count]
    for ours, theirs in zip(gpu.notes.logprobs[where], plain.notes.logprobs[where], strict=False):
        assert ours.chosen == pytest.approx(theirs.chosen, rel=1e-5, abs=1e-6)
        assert list(ours.top_ids) == list(theirs.top_ids)
        assert list(ours.top) == pytest.approx(list(theirs.top), rel=1e-5, abs=1e-6)


def test_decodes_are_replayed_and_prefills_are_not() -> None:
    device = HostDevice()
    rig = Rig(64, 32, 8, overlap=True, runner=runner(64, 32, 8, device))
    prompt = m.pack_tokens([2, 3, 4])
    for key in (1, 2, 3):
        rig.say(m.Admit(key, prompt, [m.ChoiceIn(0)], m.Sampling(), 10, ignore_eos=True))
    rig.finish()
    assert device.captured == len([1, 2, 4, 8])
    assert (device.mixed, device.replayed) == (1, 9)
    assert len({tuple(rig.notes.tokens[key, 0]) for key in (1, 2, 3)}) == 1
