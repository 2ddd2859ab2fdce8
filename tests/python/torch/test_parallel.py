"""Gradients and norms over EP x DP against one model that sees all tokens.

The exchange is stood in for by hand: an expert's gradient on its rank is the sum over the ranks of
its expert-parallel group of what their losses give it.
"""

import copy

import pytest
import torch
from torch import nn

import ferry
from ferry.torch import (GroupedExperts, MoELayer, as_communicator, clip_grad_norm_, communicators,
                         dense_parameters, expert_parameters, ignore_experts_in_ddp, mark_experts,
                         reduce_gradients, split_world)
from ranks import Ranks

WORLD, EXPERTS, HIDDEN, TOKENS = 4, 4, 6, 5


class Model(nn.Module):
    """A dense layer and experts; every token goes to all experts of `local`."""

    def __init__(self, local):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        generator = torch.Generator().manual_seed(5)  # threads share PyTorch's own
        with torch.no_grad():
            for parameter in self.dense.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.experts = GroupedExperts(HIDDEN, 3, local, seed=9)

    def parts(self, x):
        h = self.dense(x)
        return [self.experts(h.repeat(len(self.experts.local_experts), 1),
                             [len(x)] * len(self.experts.local_experts)).view(-1, *x.shape)]

    def loss(self, x):
        return sum(part.square().sum(0).mean() for part in self.parts(x))


def batches():
    return [torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(r))
            for r in range(WORLD)]


def reference():
    """Gradients of the mean over ranks of their mean losses, in one model with all experts."""
    model = Model(range(EXPERTS))
    sum(model.loss(x) for x in batches()).div(WORLD).backward()
    return model


def rank_model(rank, ep):
    """What a rank holds after backward with an expert-parallel group of `ep` consecutive ranks."""
    begin = rank // ep * ep
    local = [e for e in range(EXPERTS) if e * ep // EXPERTS == rank - begin]
    mine, whole = Model(local), Model(range(EXPERTS))
    xs = batches()
    whole.loss(xs[rank]).backward()  # its own loss: dense gradients
    mine.dense.weight.grad, mine.dense.bias.grad = whole.dense.weight.grad, whole.dense.bias.grad
    group = Model(range(EXPERTS))
    sum(group.loss(xs[r]) for r in range(begin, begin + ep)).backward()
    for name in ("w1", "w3", "w2"):
        getattr(mine.experts, name).grad = getattr(group.experts, name).grad[local].clone()
    return mine


def layout(ranks, ep):
    world = ranks.groups([list(range(WORLD))])
    copies = ranks.groups([[r for r in range(WORLD) if r % ep == place] for place in range(ep)])
    return world, copies


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_gradients_and_clipping_do_not_depend_on_the_layout(ep):
    ranks = Ranks(WORLD)
    world, copies = layout(ranks, ep)
    wanted = reference()
    norm = torch.sqrt(sum(p.grad.double().square().sum() for p in wanted.parameters()))

    def work(rank):
        model = rank_model(rank, ep)
        copy_group = copies[rank] if ep < WORLD else None
        reduce_gradients(model, world[rank], copy_group)
        before = copy.deepcopy([p.grad for p in model.parameters()])
        clipped = clip_grad_norm_(model, 0.1, world[rank], copy_group)
        return model, before, clipped
    results = ranks.run(work)
    for model, before, clipped in results:
        local = list(model.experts.local_experts)
        expected = [wanted.dense.weight.grad, wanted.dense.bias.grad] + [
            getattr(wanted.experts, n).grad[local] for n in ("w1", "w3", "w2")]
        for grad, right in zip(before, expected):
            assert torch.allclose(grad, right, rtol=1e-5, atol=1e-7)
        assert float(clipped) == pytest.approx(float(norm), rel=1e-6)
        for parameter, right in zip(model.parameters(), expected):
            assert torch.allclose(parameter.grad, right * (0.1 / norm).float(), rtol=1e-5, atol=1e-7)
    assert len({float(clipped) for _, _, clipped in results}) == 1


def test_below_the_limit_nothing_is_scaled():
    model = reference()
    before = copy.deepcopy([p.grad for p in model.parameters()])
    norm = clip_grad_norm_(model, 1e9, None)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters()))
    theirs = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert float(norm) == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("norm_type", [1.0, 3.0])
def test_other_norms(norm_type):
    model = reference()
    theirs = nn.utils.clip_grad_norm_(copy.deepcopy(model).parameters(), 1.0)  # no grads: 0
    assert float(theirs) == 0
    wanted = sum(p.grad.double().abs().pow(norm_type).sum()
                 for p in model.parameters()) ** (1 / norm_type)
    assert float(clip_grad_norm_(model, 1e9, None, norm_type=norm_type)) == pytest.approx(
        float(wanted), rel=1e-6)
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_(model, 1.0, None, norm_type=float("inf"))


def test_a_norm_that_is_not_finite():
    model = reference()
    model.dense.bias.grad[0] = float("inf")
    with pytest.raises(RuntimeError, match="is inf"):
        clip_grad_norm_(model, 1.0, None, error_if_nonfinite=True)
    assert torch.isinf(clip_grad_norm_(model, 1.0, None))
    assert all(torch.isnan(p.grad).all() for p in model.parameters())


def test_a_norm_whose_squares_leave_fp32():
    layer = nn.Linear(64, 3)
    layer.weight.grad, layer.bias.grad = torch.full((3, 64), 1e30), torch.full((3,), 1e-30)
    norm = clip_grad_norm_(layer, 1.0, None)
    assert float(norm) == pytest.approx(1e30 * 192 ** 0.5)
    assert float(layer.weight.grad.norm()) == pytest.approx(1.0)


def test_missing_gradients_count_as_zeros_in_the_same_bucket():
    ranks = Ranks(2)
    world = ranks.groups([[0, 1]])

    def work(rank):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        for place, parameter in enumerate(model.parameters()):
            if rank != place:
                parameter.grad = torch.full_like(parameter, 4.0)
        model[0].weight.requires_grad_(True)
        reduce_gradients(model, world[rank])
        return [p.grad for p in model.parameters()]
    for grads in ranks.run(work):
        assert all((g == 2).all() for g in grads)


def test_half_precision_gradients_are_summed_in_fp32():
    ranks = Ranks(4)
    world = ranks.groups([[0, 1, 2, 3]])

    def work(rank):
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        model.weight.grad = torch.full((1, 1), 256.0 if rank == 0 else 1.0).bfloat16()
        reduce_gradients(model, world[rank])
        return float(model.weight.grad)
    wanted = float(torch.tensor((256 + 3) / 4).bfloat16())
    assert ranks.run(work) == [wanted] * 4  # in bf16, 256 + 1 = 256


def test_few_buckets(monkeypatch):
    from ferry.torch import parallel
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for limit, calls in ((32 << 20, 1), (8 * 8 * 4 * 5, 5)):
        monkeypatch.setattr(parallel, "_BUCKET_BYTES", limit)
        group = Ranks(1).groups([[0]])[0]
        group.size, seen = 2, []
        monkeypatch.setattr(group, "all_reduce", lambda a: seen.append(a.size) or a)
        reduce_gradients(model, group)
        assert sum(seen) == 20 * 72 and len(seen) == calls


def test_who_is_an_expert():
    model = nn.Module()
    model.first, model.tied = nn.Linear(2, 2), nn.Linear(2, 2)
    model.tied.weight = model.first.weight
    model.block = nn.ModuleList([GroupedExperts(2, 2, [0]), mark_experts(nn.Linear(3, 3))])
    model = copy.deepcopy(model)
    experts, dense = expert_parameters(model), dense_parameters(model)
    assert [list(p.shape) for p in experts] == [[1, 2, 2]] * 3 + [[3, 3], [3]]
    assert [list(p.shape) for p in dense] == [[2, 2], [2], [2]]
    model._ddp_params_and_buffers_to_ignore = ["first.bias"]
    ignore_experts_in_ddp(model)
    assert model._ddp_params_and_buffers_to_ignore == [
        "first.bias", "block.0.w1", "block.0.w3", "block.0.w2", "block.1.weight", "block.1.bias"]


def test_ddp_leaves_experts_alone(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0,
                            world_size=1)
    try:
        model = Model([0, 1])
        wrapped = nn.parallel.DistributedDataParallel(ignore_experts_in_ddp(model))
        ignored = wrapped.parameters_to_ignore
        assert {"experts.w1", "experts.w2", "experts.w3"} == set(ignored)
        group = as_communicator(dist.group.WORLD)
        assert (group.rank, group.size) == (0, 1)
        model.loss(torch.randn(3, HIDDEN)).backward()
        before = model.experts.w1.grad.clone()
        reduce_gradients(model, dist.group.WORLD, dense=False)
        assert torch.equal(before, model.experts.w1.grad)
    finally:
        dist.destroy_process_group()


def test_what_is_no_group():
    with pytest.raises(TypeError, match="mpi4py communicator"):
        reduce_gradients(nn.Linear(1, 1), "world")
    groups = Ranks(4).groups([[0, 1, 2], [3]])
    with pytest.raises(ValueError, match="a divisor, EP x DP = world"):
        reduce_gradients(nn.Linear(1, 1), Ranks(4).groups([[0, 1, 2, 3]])[0], groups[0])


def test_forgotten_copies_are_refused():
    """Each half of the world has all experts, and their gradients would stay apart."""
    def work(world):
        split = split_world(world, 2)
        model = nn.Sequential(MoELayer(8, 4, 4, 2, group=split.expert_parallel))
        calls = (lambda *groups: reduce_gradients(model, *groups),
                 lambda *groups: clip_grad_norm_(model, 1.0, *groups))
        for call in calls:
            for groups, sizes in [((world,), "2 x 1 is not 4"), ((world, world), "2 x 4 is not 4"),
                                  ((None,), "2 x 1 is not 1")]:
                with pytest.raises(ValueError, match=f"layer '0' .* {sizes}; fix"):
                    call(*groups)
            call(world, split.expert_data_parallel)
    ferry.run(work, ranks_per_node=4)


def test_cpu_tensors_go_over_nccl_by_way_of_the_gpu(tmp_path, monkeypatch):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0,
                            world_size=1)
    try:
        group, seen = as_communicator(dist.group.WORLD), []
        group.size = 2

        def all_reduce(tensor, group):
            seen.append(tensor.data_ptr())
            tensor.mul_(2)
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        monkeypatch.setattr(communicators, "to_current_gpu", torch.clone)
        for backend, moves in (("gloo", False), ("nccl", True)):
            monkeypatch.setattr(dist, "get_backend", lambda group: backend)
            tensor = torch.ones(3)
            assert group.sum_(tensor).tolist() == [2, 2, 2] and tensor.tolist() == [2, 2, 2]
            assert (seen.pop() != tensor.data_ptr()) == moves
    finally:
        dist.destroy_process_group()
