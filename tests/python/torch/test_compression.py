"""Gradients as int8: the bits of each step, what is carried over, and steps that are left out."""

import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import ferry
from ferry.torch import (Communicator, GradientCompressor, GroupedExperts, as_communicator,
                         communicators, reduce_gradients)
from ranks import Ranks
from saving_jobs import PROGRAMS, run_program

sys.path[:0] = [str(PROGRAMS.parent), str(PROGRAMS)]
from compressed_gradients import checksum  # noqa: E402 - the program's own step
from test_mpi import LAUNCHERS, mpi4py_mpi  # noqa: E402

F32 = np.float32


def as_the_page_says(values, block):
    """The values that int8 rows decode to: docs/wire-formats.md, one block after the other."""
    result = []
    for begin in range(0, len(values), block):
        part = values[begin:begin + block]
        scale = max(np.abs(part).max() / F32(127), F32(2) ** F32(-126))
        result.append(np.rint(part * (F32(1) / scale)).astype(np.int8).astype(F32) * scale)
    return np.concatenate(result)


def draw(step, rank, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(shape, generator=generator)
            * torch.randn(shape, generator=generator).mul(3).exp()).to(dtype)


def test_the_bits_of_three_steps():
    """The sum in rank order of what the ranks' sums of gradient and residual decode to."""
    size, length, block = 3, 300, 64
    ranks = Ranks(size)
    world = ranks.groups([range(size)])

    def work(rank):
        model = nn.Linear(length, 1, bias=False)
        compressor, grads = GradientCompressor(model, block=block), []
        for step in range(3):
            model.weight.grad = draw(step, rank, (1, length))
            reduce_gradients(model, world[rank], compressor=compressor)
            grads.append(model.weight.grad.numpy()[0].copy())
        return grads, compressor.residual(model.weight).numpy()[0]
    results = ranks.run(work)
    carried = np.zeros((size, length), F32)
    for step in range(3):
        sent = np.zeros((size, length), F32)
        for rank in range(size):
            carried[rank] += draw(step, rank, (1, length)).numpy()[0] * F32(1 / size)
            sent[rank] = as_the_page_says(carried[rank], block)
            carried[rank] -= sent[rank]
        total = sent[0] + sent[1] + sent[2]
        for grads, _ in results:
            assert grads[step].tobytes() == total.tobytes()
    for (_, residual), right in zip(results, carried):
        assert residual.tobytes() == right.tobytes()


@pytest.mark.parametrize("feedback", [True, False])
def test_small_gradients_beside_a_large_one_converge_only_with_feedback(feedback):
    """Each rank's loss is 0.5 |x - 1|^2, but for one element whose large gradient changes its sign in
    every step: half a code of its block is more than the gradients of all the others."""
    ranks = Ranks(2)
    world = ranks.groups([[0, 1]])

    def work(rank):
        model = nn.Linear(96, 1, bias=False)
        nn.init.zeros_(model.weight)
        compressor = GradientCompressor(model)
        for step in range(300):
            if not feedback:
                compressor.load_state_dict({})
            model.weight.grad = model.weight.detach() - 1
            model.weight.grad[0, 40] = 300 * (-1) ** step
            reduce_gradients(model, world[rank], compressor=compressor)
            model.weight.data -= 0.02 * model.weight.grad
        return torch.cat([model.weight.detach()[0, :40], model.weight.detach()[0, 41:]])
    for others in ranks.run(work):
        if feedback:
            assert float((others - 1).abs().max()) < 0.1
        else:
            assert (others == 0).all()


class Split(nn.Module):
    """What one of four ranks has of EP2 x DP2: a dense layer, and two of four experts."""

    def __init__(self, rank, dtype=None):
        super().__init__()
        self.dense = nn.Linear(24, 9, dtype=dtype)
        self.experts = GroupedExperts(8, 6, [0, 1] if rank % 2 == 0 else [2, 3], dtype=dtype)

    def draw(self, step, rank, factor=1.0):
        for number, parameter in enumerate(self.parameters()):
            parameter.grad = draw(10 * step + number, rank, parameter.shape, parameter.dtype) * factor

    def grads(self):
        return [parameter.grad.clone() for parameter in self.parameters()]


def split_groups():
    ranks = Ranks(4)
    return ranks, ranks.groups([range(4)]), ranks.groups([[0, 2], [1, 3]])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_nothing_is_lost_or_counted_twice_when_steps_are_left_out(bad):
    """Over all steps that are taken, what was reduced and what the ranks still hold is what the
    gradients were. The loss scale changes, and two steps have an expert's gradient that is not finite."""
    ranks, world, copies = split_groups()
    scales = [1.0, 4096.0, 4096.0, 2048.0, 0.125, 1.0]
    lost = {2: 3, 4: 0}  # step -> the one rank that has it

    def work(rank):
        model = Split(rank)
        compressor = GradientCompressor(model, block=32)
        wanted, got = ([torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
                       for _ in range(2))
        for step, scale in enumerate(scales):
            model.draw(step, rank, scale)
            compressor.loss_scale = scale
            if lost.get(step) == rank:
                model.experts.w1.grad[0, 1, 2] = bad
            before = {name: one.clone() for name, one in compressor.state_dict().items()}
            own = model.grads()
            reduce_gradients(model, world[rank], copies[rank], compressor=compressor)
            if step in lost:
                after = compressor.state_dict()
                assert before.keys() == after.keys() and len(before) == 5
                assert all(torch.equal(before[name], after[name]) for name in before)
                has_it = rank % 2 == lost[step] % 2
                assert bool(torch.isfinite(model.experts.w1.grad).all()) != has_it
                assert all(torch.isfinite(p.grad).all() for p in model.dense.parameters())
                continue  # as every rank's scaler does, after clip_grad_norm_
            for total, one in zip(wanted, own):
                total += one.double() / scale / 4
            for total, parameter in zip(got, model.parameters()):
                total += parameter.grad.double() / scale
        return wanted, got, [compressor.residual(p).double() for p in model.parameters()]
    results = ranks.run(work)
    num_dense = 2
    for rank, (_, got, _) in enumerate(results):
        for number, reduced in enumerate(got):
            sharing = range(4) if number < num_dense else (rank % 2, rank % 2 + 2)
            true, held = (sum(results[other][part][number] for other in sharing) for part in (0, 2))
            limit = 1e-6 * float(true.abs().max())
            assert float((reduced + held - true).abs().max()) < limit
            assert float(held.abs().max()) > 100 * limit  # and it was rounded


def test_a_large_step_that_is_taken_keeps_the_residual():
    """f16: the second gradients, together with what was left of the first, would overflow."""
    ranks = Ranks(2)
    world = ranks.groups([[0, 1]])

    def work(rank):
        model = nn.Linear(2, 1, bias=False, dtype=torch.float16)
        compressor = GradientCompressor(model)
        for grad, wanted in (([50000.0, 190.0], [50000.0, 0.0]), ([65504.0, 0.0], [65504.0, 0.0]),
                             ([0.0, 65400.0], [0.0, 65400.0]), ([0.0, 1.0], [0.0, 191.0])):
            model.weight.grad = torch.tensor([grad], dtype=torch.float16)
            reduce_gradients(model, world[rank], compressor=compressor)
            assert torch.allclose(model.weight.grad.float(), torch.tensor([wanted]), rtol=0.01), wanted
    ranks.run(work)


def test_what_is_not_compressed():
    """FP64, experts without copies, frozen parameters; a missing gradient counts as zeros."""
    ranks = Ranks(2)
    world = ranks.groups([[0, 1]])

    def work(rank):
        model = nn.ModuleList([nn.Linear(5, 1, bias=False, dtype=torch.float64),
                               GroupedExperts(3, 2, [rank]), nn.Linear(3, 1), nn.Linear(3, 1)])
        model[3].weight.requires_grad_(False)
        compressor = GradientCompressor(model)
        model[0].weight.grad = draw(1, rank, (1, 5), torch.float64)
        model[1].w1.grad = draw(2, rank, (1, 2, 3))
        if rank == 0:
            model[2].weight.grad = torch.tensor([[127.0, 0.25, 0.0]])
        reduce_gradients(model, world[rank], compressor=compressor)
        assert sorted(compressor.state_dict()) == ["2.bias", "2.weight", "3.bias"]
        mean = (draw(1, 0, (1, 5), torch.float64) + draw(1, 1, (1, 5), torch.float64)) / 2
        assert torch.allclose(model[0].weight.grad, mean, rtol=1e-15)
        assert torch.equal(model[1].w1.grad, draw(2, rank, (1, 2, 3)) / 2)
        assert model[2].weight.grad.tolist() == [[63.5, 0.0, 0.0]] and model[3].weight.grad is None
        residual = compressor.residual(model[2].weight)
        assert residual.tolist() == ([[0.0, 0.125, 0.0]] if rank == 0 else [[0.0] * 3])
    ranks.run(work)


def test_a_parameter_that_lost_its_copies_gets_what_is_left():
    model = nn.Linear(3, 1, bias=False, dtype=torch.float16)
    compressor = GradientCompressor(model)
    compressor.load_state_dict({"weight": torch.tensor([[1e-8, 2.0, 0.0]])})  # below f16, unscaled
    compressor.loss_scale = 1024.0
    for wanted in ([[1e-8 * 1024, 2049.0, 1.0]], [[0.0, 1.0, 1.0]]):
        model.weight.grad = torch.tensor([[0.0, 1.0, 1.0]]).half()
        reduce_gradients(model, None, compressor=compressor)
        assert torch.allclose(model.weight.grad.float(), torch.tensor(wanted), rtol=1e-2, atol=0)
    assert compressor.residual(model.weight) is None


@pytest.mark.parametrize("nodes, ranks_per_node", [(2, 1), (2, 2)])
def test_a_quarter_of_the_bytes_and_the_same_bits_on_every_rank(nodes, ranks_per_node):
    def body(world):
        model = nn.Sequential(*[nn.Linear(96, 96) for _ in range(3)])
        compressor = GradientCompressor(model)

        def reduced(**options):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = draw(number, world.rank, parameter.shape)
            world.barrier()
            before = sum(world.counters()[f"{kind}_bytes"] for kind in ("payload", "metadata", "control"))
            reduce_gradients(model, world, **options)
            world.barrier()
            after = sum(world.counters()[f"{kind}_bytes"] for kind in ("payload", "metadata", "control"))
            return after - before, b"".join(p.grad.numpy().tobytes() for p in model.parameters())
        return reduced(), reduced(compressor=compressor)
    results = ferry.run(body, nodes=nodes, ranks_per_node=ranks_per_node)
    plain, compressed = (sum(one[kind][0] for one in results) for kind in (0, 1))
    assert 0 < compressed <= 0.27 * plain, (compressed, plain)
    assert len({bits for _, (_, bits) in results}) == 1


def wanted_checksum(size):
    ranks = Ranks(size)
    world = ranks.groups([range(size)])
    crcs = set(ranks.run(lambda rank: checksum(world[rank], rank)))
    assert len(crcs) == 1
    return crcs.pop()


def test_processes_of_an_mpi_job():
    mpi = mpi4py_mpi()
    if mpi is None or shutil.which(LAUNCHERS[mpi][0]) is None or (
            mpi not in os.environ.get("FERRY_TEST_MPIS", "")):
        pytest.skip("no mpi4py, no launcher of its MPI, or no module for it")
    said = run_program([*LAUNCHERS[mpi], sys.executable, "-B",
                        str(PROGRAMS / "compressed_gradients.py"), "mpi"])
    assert sorted(said.splitlines()) == [f"rank {r}: {wanted_checksum(4)}" for r in range(4)]


def test_processes_of_torch_distributed(tmp_path):
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        pytest.skip("this host's name has no address, by which gloo's ranks would meet")
    ranks = [subprocess.Popen(
        [sys.executable, "-B", str(PROGRAMS / "compressed_gradients.py"), "gloo",
         str(tmp_path / "rendezvous"), str(rank), "3"], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT) for rank in range(3)]
    try:
        said = [rank.communicate(timeout=110)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert said == [f"rank {rank}: {wanted_checksum(3)}\n" for rank in range(3)]


def test_cpu_tensors_are_gathered_over_nccl_by_way_of_the_gpu(tmp_path, monkeypatch):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0,
                            world_size=1)
    try:
        group, seen = as_communicator(dist.group.WORLD), []
        group.size = 2

        def all_gather(parts, tensor, group):
            seen.append(tensor.data_ptr())
            parts[0].copy_(tensor)
        monkeypatch.setattr(dist, "all_gather", all_gather)
        monkeypatch.setattr(communicators, "to_current_gpu", torch.clone)
        for backend, moves in (("gloo", False), ("nccl", True)):
            monkeypatch.setattr(dist, "get_backend", lambda group: backend)
            tensor = torch.arange(3, dtype=torch.uint8)
            assert group.gather(tensor).tolist() == [[0, 1, 2]]
            assert (seen.pop() != tensor.data_ptr()) == moves
    finally:
        dist.destroy_process_group()


def test_what_is_refused():
    model = nn.Linear(2, 1)
    for block in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="block = .*; allowed: a whole number"):
            GradientCompressor(model, block=block)
    compressor = GradientCompressor(model)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="loss_scale = .*; allowed: a finite number above 0"):
            compressor.loss_scale = scale
    with pytest.raises(ValueError, match="'weight' is not a parameter of the compressor's model"):
        reduce_gradients(nn.Linear(2, 1), None, compressor=compressor)
    compressor.load_state_dict({"bias": torch.ones(1)})
    for state, text in (({"weight": torch.ones(2)}, r"is \[2\], the model's parameter is \[1, 2\]"),
                        ({"bias": torch.zeros(1), "other": torch.ones(1)}, "is not there; fix")):
        with pytest.raises(ValueError, match=text):
            compressor.load_state_dict(state)
    assert compressor.state_dict()["bias"].tolist() == [1.0]
    with pytest.raises(TypeError, match="can sum and not gather; fix"):
        reduce_gradients(model, Communicator(0, 2, sum_array=lambda array: array),
                         compressor=compressor)


def test_ranks_that_differ_are_refused_on_every_rank():
    def body(world):
        model = nn.Linear(2, 1)
        with pytest.raises(ferry.MismatchError, match="of rank 2 has block = 64 and loss_scale = 1.0, "
                                                      "that of rank 0 128 and 1.0"):
            reduce_gradients(model, world, compressor=GradientCompressor(
                model, block=64 if world.rank == 2 else 128))
        compressor = GradientCompressor(model)
        compressor.loss_scale = 2.0 if world.rank == 1 else 4.0
        with pytest.raises(ferry.MismatchError, match="of rank 1 .* loss_scale = 2.0, .* and 4.0"):
            reduce_gradients(model, world, compressor=compressor)
        with pytest.raises(ferry.MismatchError, match=r"rank 2 gives \[1\] to a gathering, rank 0 \[2\]"):
            as_communicator(world).gather(torch.zeros(1 if world.rank == 2 else 2))
    ferry.run(body, ranks_per_node=3)
