"""Saved models and optimisers: the same bits in every split and placement, and what does not fit."""

import json
import shutil
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import ferry
from ferry.torch import (GroupedExperts, MoELayer, latest_checkpoint, load_checkpoint, mark_experts,
                         save_checkpoint)
from saving_jobs import (EXPERTS, HIDDEN, LAYOUTS, PROGRAMS, Block, Job, entries, failing_saves,
                         loaded, refusals, run, run_program, saved)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A checkpoint of each layout, made once."""
    made = {}

    def of(layout):
        if layout not in made:
            directory = tmp_path_factory.mktemp("run")
            made[layout] = (directory, *saved(directory, layout))
        return made[layout]
    return of


@pytest.fixture
def run7(runs):
    """A checkpoint of layout ep2."""
    return latest_checkpoint(runs("ep2")[0])


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_loads_every_other_to_the_same_bits(runs, source, target):
    directory, held, loss = runs(source)
    again, next_loss = loaded(directory, target)
    assert again == held
    assert next_loss == loss


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    def body(world):
        job, other = (Job(world, "ep2 x dp2", seed=seed).trained(seed) for seed in (2, 1))
        save_checkpoint(tmp_path, job.model, job.optimizer, group=world, step=2)
        load_checkpoint(tmp_path, other.model, other.optimizer, group=world)
        for one in (job, other):
            one.step(2)
        return job.held() == other.held()
    assert all(run(body, "ep2 x dp2"))


def test_every_tensor_is_written_once_by_its_lowest_rank(runs):
    directory, held, _ = runs("ep2 x dp2")
    checkpoint = latest_checkpoint(directory)
    assert checkpoint == directory / "step-00000003"
    files = {path.name: numpy.load(path, allow_pickle=False) for path in checkpoint.glob("*.npz")}
    assert sorted(files) == ["rank-00000.npz", "rank-00001.npz"]  # 2 and 3 hold copies
    names = [name for file in files.values() for name in file.files]
    tensors = [name for name in held if not isinstance(name, int) and name[1] != "step"]
    assert len(names) == len(set(names)) == len(tensors)
    for expert in range(EXPERTS):
        file = files["rank-00000.npz" if expert < 4 else "rank-00001.npz"]
        for name in (f"model/1.moe.experts/{expert}/w2",
                     f"optimizer/max_exp_avg_sq/0.moe.experts/{expert}/w1"):
            assert name in file.files
        assert file[f"model/1.moe.experts/{expert}/w2"].tobytes() == (
            held["1.moe.experts.w2", "itself", expert][2])
    assert {"model/1.moe.gate.selection_bias", "model/0.calls"} <= set(files["rank-00000.npz"].files)


def test_bf16_experts(tmp_path):
    held, loss = saved(tmp_path, "ep4", dtype=torch.bfloat16)
    assert loaded(tmp_path, "permuted", dtype=torch.bfloat16) == (held, loss)
    checkpoint = latest_checkpoint(tmp_path)
    listed = json.loads((checkpoint / "index.json").read_text())["tensors"]
    one = listed["model/0.moe.experts/5/w1"]
    assert (one["dtype"], one["shape"], one["file"]) == ("bf16", [6, HIDDEN], "rank-00002.npz")
    array = numpy.load(checkpoint / one["file"], allow_pickle=False)["model/0.moe.experts/5/w1"]
    assert array.dtype == numpy.uint16 and array.tobytes() == (
        held["0.moe.experts.w1", "itself", 5][2])
    text = refusals(tmp_path, "ep2")
    assert "'model/0.moe.experts/0/w1', of expert 0 of '0.moe.experts' is bf16 [6, 8]" in text


@pytest.mark.parametrize("make", [
    lambda groups: torch.optim.SGD(groups, lr=0.1),  # PyTorch 1.13 keeps None as its momentum
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam],
    ids=["sgd", "momentum", "rmsprop", "adagrad", "nadam"])
def test_other_optimisers(tmp_path, make):
    held = saved(tmp_path, "uneven", optimizer=make)
    assert loaded(tmp_path, "ep2", optimizer=make) == held


def test_layouts_of_the_state_in_other_versions_of_pytorch(tmp_path):
    """Before 1.12 `step` was an int; PyTorch 2 may have lr and betas as tensors."""
    def body(world):
        job, other = Job(world, "ep2").trained(1), Job(world, "ep2", seed=2)
        for state in job.optimizer.state.values():
            state["step"] = 17
        for one in (job, other):
            group = one.optimizer.param_groups[0]
            group["lr"], group["betas"] = torch.tensor(group["lr"]), (torch.tensor(0.5), 0.75)
        job.optimizer.param_groups[0]["lr"].fill_(0.125)
        job.optimizer.param_groups[1]["initial_lr"] = 0.25  # as schedulers leave it
        save_checkpoint(tmp_path, job.model, job.optimizer, group=world, step=17)
        load_checkpoint(tmp_path, other.model, other.optimizer, group=world)
        first, second = other.optimizer.param_groups
        assert isinstance(first["lr"], torch.Tensor) and float(first["lr"]) == 0.125
        assert isinstance(first["betas"][0], torch.Tensor) and float(first["betas"][0]) == 0.5
        assert first["betas"][1] == 0.75 and second["initial_lr"] == 0.25
        assert second["betas"] == (0.9, 0.999)
        # This PyTorch keeps tensors, and makes them when it is given a state.
        steps = {(type(state["step"]), float(state["step"]))
                 for state in other.optimizer.state.values()}
        assert steps == {(torch.Tensor, 17.0)}
    run(body)


def test_before_the_first_step_and_without_an_optimiser(tmp_path):
    def body(world):
        job, other = Job(world, "ep2"), Job(world, "ep2", seed=2).trained(1)
        save_checkpoint(tmp_path, job.model, job.optimizer, group=world, step=0)
        load_checkpoint(tmp_path, other.model, other.optimizer, group=world)
        assert other.held() == job.held() and not other.optimizer.state
        job.trained(1)
        save_checkpoint(tmp_path, job.model, job.optimizer, group=world, step=1)
        state = other.optimizer.state_dict()
        load_checkpoint(tmp_path, other.model, group=world)
        assert str(other.optimizer.state_dict()) == str(state)
        for one, two in zip(other.model.state_dict().values(), job.model.state_dict().values()):
            assert torch.equal(one, two)
        save_checkpoint(tmp_path, job.model, group=world, step=2)
        with pytest.raises(ValueError, match="is AdamW with 2 parameter groups, in the checkpoint "
                                             "none; .* the model alone"):
            load_checkpoint(tmp_path, other.model, other.optimizer, group=world)
        with pytest.raises(ValueError, match="is AdamW .* in the checkpoint none"):
            load_checkpoint(tmp_path, job.model, job.optimizer, group=world)
        load_checkpoint(tmp_path, job.model, job.optimizer, group=world, step=1)
    run(body)


def test_a_wrapped_model_has_the_same_names(tmp_path):
    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    def body(world):
        job, other = Job(world, "ep2"), Job(world, "ep2", seed=2)
        save_checkpoint(tmp_path, Wrapped(job.model), group=world, step=0)
        load_checkpoint(tmp_path, other.model, group=world)
        assert torch.equal(job.model[0].moe.experts.w1, other.model[0].moe.experts.w1)
    run(body)


class Own(nn.Module):
    """Experts of one's own."""

    def __init__(self, ids, stacked=True):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([float(i) for i in ids]))
        self.extra = nn.ModuleList([nn.Linear(1, 1)])
        self.extra[0].weight = nn.Parameter(torch.tensor([[2.0 * i] for i in ids]))
        self.extra[0].bias = None
        if stacked:
            self.local_experts = ids

    def forward(self, rows, expert_counts):
        return rows


def test_experts_of_ones_own(tmp_path):
    def made(world, rank_of, stacked=True):
        ids = [expert for expert, rank in enumerate(rank_of) if rank == world.rank]
        return nn.Sequential(MoELayer(4, 4, 3, 1, group=world, experts=Own(ids, stacked),
                                      placement=ferry.Placement.from_map(rank_of)),
                             GroupedExperts(2, 2, ids))

    def body(world):
        save_checkpoint(tmp_path, made(world, [0, 1, 0]), group=world, step=1)
        other = made(world, [1, 1, 0])
        for parameter in other.parameters():
            parameter.data.zero_()
        load_checkpoint(tmp_path, other, group=world)
        assert other[0].experts.scale.tolist() == ([2] if world.rank == 0 else [0, 1])
        assert other[0].experts.extra[0].weight.tolist() == (
            [[4]] if world.rank == 0 else [[0], [2]])
        assert (other[1].w1 != 0).all()
        with pytest.raises(ValueError, match="'0.experts.scale' belongs to experts, and it is not "
                                             "known to which; .* local_experts"):
            save_checkpoint(tmp_path, made(world, [0, 1, 0], False), group=world, step=2)
        twice = nn.Sequential(mark_experts(Own([1, 1])))
        with pytest.raises(ValueError, match=r"'0/scale' has local_experts \[1, 1\]"):
            save_checkpoint(tmp_path, twice, group=world, step=2)
        twice[0].local_experts = [1]
        with pytest.raises(ValueError, match=r"'0/scale' is \[2\]; allowed: \[1, ...\]"):
            load_checkpoint(tmp_path, twice, group=world)
    ferry.run(body, ranks_per_node=2)


def test_models_that_do_not_fit(run7):
    text = refusals(run7.parent, make=lambda job: (job.model[0], None))
    assert "lacks 'model/calls'; fix: build the model that was saved" in text

    def wider(job):
        job.model[1].moe.experts = GroupedExperts(HIDDEN, 7, job.model[1].moe.local_experts)
        return job.model, None
    text = refusals(run7.parent, "ep1", make=wider)
    assert (f"{run7}: 'model/1.moe.experts/0/w1', of expert 0 of '1.moe.experts' is f32 [6, 8] in "
            "the checkpoint, in the model torch.float32 [7, 8]") in text

    def more_experts(job):
        return nn.Sequential(Block(job.world, num_experts=9)), None
    assert "'0.moe.experts' has 9 experts, in the checkpoint 8" in refusals(run7.parent,
                                                                            make=more_experts)
    text = refusals(run7.parent, make=lambda job: (nn.Sequential(job.model[0]), None))
    assert "has 'model/1.calls', and 31 more, that no rank of the group has" in text


def test_optimisers_that_do_not_fit(run7):
    def text(groups, kind=torch.optim.AdamW):
        return refusals(run7.parent, make=lambda job: (job.model, kind(groups(job.model))))
    assert "is SGD with 2 parameter groups, in the checkpoint AdamW, 2 groups" in refusals(
        run7.parent, optimizer=lambda groups: torch.optim.SGD(groups, lr=1))
    assert "is AdamW with 1 parameter groups" in text(lambda model: model.parameters())

    def swapped(model):
        names = dict(model.named_parameters())
        return [{"params": [p for name, p in names.items() if (".experts." in name) is expert]}
                for expert in (True, False)]
    assert "'0.moe.experts/w1' is in group 0 of the optimiser, and not so in" in text(swapped)
    assert "a parameter [1, 3] of the optimiser's group 1 is not in the model" in text(
        lambda model: [{"params": model.parameters()},
                       {"params": nn.Linear(3, 1).parameters()}])


def test_what_cannot_be_saved(tmp_path):
    for options, text in (({"step": -1}, "step = -1, keep = 2; allowed: at least 0"),
                          ({"keep": -1}, "keep = -1"),
                          ({"extra": {"a": (1, 2)}}, "lists for tuples"),
                          ({"extra": {1: 2}}, "str for other keys"),
                          ({"extra": {"a": {3}}}, "extra is no JSON"),
                          ({"extra": {"step": 8}}, "without 'step'")):
        assert text in failing_saves(tmp_path, ValueError, **options)
    assert "(TypeError)" in failing_saves(tmp_path, RuntimeError, step="8")

    def body(world):
        job = Job(world, "ep4")
        part = world.subgroup([0, 1] if world.rank < 2 else [2, 3])
        with pytest.raises(ValueError, match="no rank of the group has expert [04] of '0.moe.exp.*"
                                             "fix: give the group of all ranks"):
            save_checkpoint(tmp_path, job.model, group=part, step=1)
        with pytest.raises(ferry.MismatchError, match="rank 1 saves step 1, rank 0 step 0"):
            save_checkpoint(tmp_path, job.model, group=world, step=world.rank)
        with pytest.raises(ferry.MismatchError, match="optimiser of rank 3 has another type"):
            job.optimizer.param_groups[0]["lr"] = 0.5 if world.rank == 3 else 0.25
            save_checkpoint(tmp_path, job.model, job.optimizer, group=world, step=1)
        with pytest.raises(ferry.MismatchError, match="'model/weight' is .*2, 2.* on rank 2, .*1, 2"):
            save_checkpoint(tmp_path, nn.Linear(2, 1 + world.rank // 2), group=world, step=1)
        with pytest.raises(ValueError, match="model/weight is torch.complex64; allowed"):
            model = nn.Module()
            model.register_buffer("weight", torch.zeros(2, dtype=torch.complex64))
            save_checkpoint(tmp_path, model, group=world, step=1)
        for state, text in ((torch.zeros(6), r"is \[6\]; allowed: one number, or \[2, 6, 8\]"),
                            ({"a": 1}, "the state 'odd' of the optimiser is a dict")):
            job.optimizer.state[job.model[0].moe.experts.w1]["odd"] = state
            with pytest.raises(ValueError, match=text):
                save_checkpoint(tmp_path, job.model, job.optimizer, group=world, step=1)
        with pytest.raises(TypeError, match="group is a NoneType; allowed: a ferry Group"):
            load_checkpoint(tmp_path, job.model, group=None)
    run(body, "ep4")
    assert entries(tmp_path) == []


@pytest.mark.parametrize("mpi, launcher", [
    ("openmpi", ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "--mca",
                 "mpi_yield_when_idle", "1", "-n", "2"]),
    ("mpich", ["mpiexec.mpich", "-n", "2"])])
def test_ranks_are_processes(tmp_path, mpi, launcher):
    if shutil.which(launcher[0]) is None or not (
            Path(ferry.__file__).parent / f"ferry_mpi_{mpi}.so").exists():
        pytest.skip(f"no {launcher[0]}, or no module for it")
    said = run_program([*launcher, sys.executable, "-B", str(PROGRAMS / "saving.py"),
                        str(tmp_path / "run")])
    assert sorted(said.splitlines()) == ["rank 0 is right", "rank 1 is right"]
