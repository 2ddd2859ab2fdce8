"""Checkpoints of runs with compressed gradients: the same bits in the same split, the same sums in
every other."""

import json

import numpy
import pytest
from torch import nn

import ferry
from ferry.torch import GradientCompressor, latest_checkpoint, load_checkpoint, save_checkpoint
from saving_jobs import HIDDEN, LAYOUTS, Job, entries, run


def unsent(job):
    """What a rank has not sent, by a name of the whole model, and as bytes."""
    place = job.split.expert_parallel.rank
    mine = [expert for expert, rank in enumerate(job.rank_of) if rank == place]
    found = {}
    for name, residual in job.compressor.state_dict().items():
        if ".experts." in name:
            found.update({(name, expert): part.double().numpy()
                          for expert, part in zip(mine, residual, strict=True)})
        else:
            found[name] = residual.double().numpy()
    return found


def bits_of(state):
    return {name: residual.numpy().tobytes() for name, residual in state.items()}


def sums(by_rank):
    total = {}
    for found in by_rank:
        for name, residual in found.items():
            total[name] = total.get(name, 0.0) + residual
    return {name: one for name, one in total.items() if one.any()}


@pytest.mark.parametrize("layout", ["ep4", "ep2 x dp2"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, layout):
    def body(world):
        def made(seed):
            return Job(world, layout, seed=seed, compress=True)
        job, other, forgetful = made(1).trained(2), made(2).trained(1), made(2)
        save_checkpoint(tmp_path, job.model, job.optimizer, group=world, step=2,
                        compressor=job.compressor)
        load_checkpoint(tmp_path, other.model, other.optimizer, group=world,
                        compressor=other.compressor)
        load_checkpoint(tmp_path, forgetful.model, forgetful.optimizer, group=world)
        assert not forgetful.compressor.state_dict()
        states = [bits_of(one.compressor.state_dict()) for one in (job, other)]
        assert states[0] == states[1] and len(states[0]) >= 10
        for one in (job, other, forgetful):
            one.step(2)
            one.step(3)
        return [one.held() for one in (job, other, forgetful)], [
            one.loss() for one in (job, other, forgetful)]
    for held, losses in run(body, layout):
        assert held[0] == held[1] != held[2]
        assert losses[0] == losses[1]
        assert losses[0] is None or losses[1] != losses[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A checkpoint of each layout, made once, and what its ranks had not sent."""
    made = {}

    def of(layout):
        if layout not in made:
            directory = tmp_path_factory.mktemp("run")

            def body(world):
                job = Job(world, layout, compress=True).trained(2)
                save_checkpoint(directory, job.model, job.optimizer, group=world, step=2,
                                compressor=job.compressor)
                return unsent(job)
            made[layout] = (directory, run(body, layout))
        return made[layout]
    return of


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", ["ep4", "ep2 x dp2"])
def test_the_sums_over_the_ranks_stay_in_every_split(runs, source, target):
    directory, before = runs(source)
    wanted = sums(before)
    num_experts_parts = sum(isinstance(name, tuple) for name in wanted)
    assert num_experts_parts == (0 if source == "ep4" else 2 * 3 * 8)

    def body(world):
        job = Job(world, target, seed=2, compress=True)
        load_checkpoint(directory, job.model, job.optimizer, group=world, compressor=job.compressor)
        loaded = unsent(job)
        job.step(2)
        return loaded, unsent(job)
    results = run(body, target)
    got = sums(loaded for loaded, _ in results)
    assert got.keys() == wanted.keys()
    for name, one in wanted.items():
        numpy.testing.assert_allclose(got[name], one, rtol=0, atol=1e-6 * numpy.abs(one).max())
    if target == source:
        for rank, (loaded, _) in enumerate(results):
            assert all((loaded[name] == before[rank][name]).all() for name in before[rank])
    # What has no copies now is not compressed, and what was left of it went into the step.
    later = sums(after for _, after in results)
    experts_now = {name for name in later if isinstance(name, tuple)}
    assert bool(experts_now) == (LAYOUTS[target][0] > LAYOUTS[target][1])
    assert bool(later) == (LAYOUTS[target][0] > 1)


def test_a_run_begins_to_compress_and_leaves_off(runs):
    directory, _ = runs("ep4")

    def body(world):
        plain = Job(world, "ep2")
        load_checkpoint(directory, plain.model, plain.optimizer, group=world)
        save_checkpoint(directory / "plain", plain.model, plain.optimizer, group=world, step=1)
        job = Job(world, "ep2", compress=True).trained(1)
        assert job.compressor.state_dict()
        load_checkpoint(directory / "plain", job.model, job.optimizer, group=world,
                        compressor=job.compressor)
        assert not job.compressor.state_dict()
    run(body, "ep2")


def test_each_rank_writes_its_own(runs):
    checkpoint = latest_checkpoint(runs("ep2 x dp2")[0])
    listed = json.loads((checkpoint / "index.json").read_text())["tensors"]
    names = [name for name in listed if name.startswith("residual/")]
    assert all(listed[name]["file"] == f"rank-0000{name.split('/')[1]}.npz"
               and listed[name]["dtype"] == "f32" for name in names)
    assert listed["residual/3/1.moe.experts/6/w2"]["shape"] == [HIDDEN, 6]
    assert "residual/1/0.dense.weight" in names and "residual/0/1.moe.experts/6/w2" not in names


def test_what_is_refused_changes_nothing(runs, tmp_path):
    directory, _ = runs("ep4")

    def body(world):
        job = Job(world, "ep2", compress=True).trained(1)
        held, before = job.held(), bits_of(job.compressor.state_dict())
        only_one = job.compressor if world.rank == 0 else None
        strange = GradientCompressor(nn.Linear(1, 1)) if world.rank == 1 else job.compressor
        for compressor, error, text in (
                (only_one, ferry.MismatchError, "rank 1 gives no compressor, rank 0 does otherwise"),
                (strange, ValueError, "on rank 1: .*'0.*' is not a parameter of the compressor's")):
            with pytest.raises(error, match=f"load_checkpoint: {text}"):
                load_checkpoint(directory, job.model, job.optimizer, group=world,
                                compressor=compressor)
            with pytest.raises(error, match=f"save_checkpoint: {text}"):
                save_checkpoint(tmp_path, job.model, job.optimizer, group=world, step=1,
                                compressor=compressor)
        assert (job.held(), bits_of(job.compressor.state_dict())) == (held, before)
        damaged = tmp_path / "damaged"
        save_checkpoint(damaged, job.model, group=world, step=1, compressor=job.compressor)
        if world.rank == 1:
            path, own = latest_checkpoint(damaged) / "rank-00001.npz", before["1.dense.weight"]
            content = path.read_bytes()
            assert content.count(own) == 1
            path.write_bytes(content.replace(own, own[::-1]))
        world.barrier()
        with pytest.raises(ValueError, match="'residual/1/1.dense.weight'"):
            load_checkpoint(damaged, job.model, group=world, compressor=job.compressor)
        assert (job.held(), bits_of(job.compressor.state_dict())) == (held, before)
    run(body, "ep2")
    assert entries(tmp_path) == ["damaged"]
