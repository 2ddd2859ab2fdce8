"""The staging of device tensors, with the CPU in the part of the device: that everything is copied
there and back, in the right order, is all that a machine without a GPU can show."""

from types import SimpleNamespace

import pytest
import torch

import ferry
from ferry.torch import MoELayer, staging


@pytest.fixture
def pretend_device(monkeypatch):
    """CPU tensors count as a device's; copies are real; returns what was waited for and pinned."""
    log = []
    real_empty = torch.empty

    def empty(*shape, pin_memory=False, **options):
        if pin_memory:
            log.append("pinned")
        return real_empty(*shape, **options)
    monkeypatch.setattr(staging, "is_host", lambda device: False)
    monkeypatch.setattr(staging, "wait_for_stream", lambda device: log.append("waited"))
    monkeypatch.setattr(staging.torch, "empty", empty)
    real_to = torch.Tensor.to

    def to(self, *arguments, **options):
        moved = real_to(self, *arguments, **options)
        return moved.clone() if options.get("non_blocking") else moved
    monkeypatch.setattr(torch.Tensor, "to", to)
    return log


def test_to_host_and_back_copy_and_wait(pretend_device):
    x = torch.randn(3, 4, requires_grad=True)
    host = staging.to_host(x)
    assert torch.equal(host, x) and host.data_ptr() != x.data_ptr() and not host.requires_grad
    assert pretend_device == ["pinned", "waited"]
    back = staging.to_device(host, x.device)
    assert torch.equal(back, x) and back.data_ptr() != host.data_ptr()
    assert pretend_device == ["pinned", "waited", "waited"]


def test_cpu_tensors_are_not_copied():
    x = torch.randn(5, 8)
    rows = x[:, :6]
    assert staging.to_host(x).data_ptr() == x.data_ptr()
    assert staging.to_host(rows).data_ptr() == rows.data_ptr()
    assert staging.to_device(x, x.device) is x
    for other in (x.t(), x[:, ::2], x[:1].expand(5, 8)):
        host = staging.to_host(other)
        assert host.is_contiguous() and torch.equal(host, other)


def step(group, **options):
    layer = MoELayer(16, 12, 8, 2, 1, group=group, seed=3, **options)
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(7, 16, generator=generator).requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    return [out.detach(), x.grad] + [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("options", [{}, {"overlap": 2}, {"weights": "at_expert"}])
def test_a_staged_layer_gives_the_same_bits(options, request):
    plain = ferry.run(step, nodes=2, ranks_per_node=2, kwargs=options)
    log = request.getfixturevalue("pretend_device")
    staged = ferry.run(step, nodes=2, ranks_per_node=2, kwargs=options)
    assert log.count("waited") > 8 and "pinned" in log
    for mine, theirs in zip(staged, plain):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


def test_other_devices_are_refused():
    def work(group):
        layer = MoELayer(16, 12, 8, 2, group=group)
        with pytest.raises(ValueError, match="staged through pinned host memory; fix: move it"):
            staging.check_device(torch.empty(2, 16, device="meta"), "x", group)
        with pytest.raises((ValueError, NotImplementedError, RuntimeError)):
            layer(torch.empty(2, 16, device="meta"))
    ferry.run(work)


def test_cuda_with_ranks_as_threads_is_refused(monkeypatch):
    """Autograd has one thread per device: the ranks' backwards would wait for each other in it."""
    x = SimpleNamespace(device=torch.device("cuda", 0))

    def work(group):
        with pytest.raises(ValueError, match="the 2 ranks are threads of a process.*ferry.init"):
            staging.check_device(x, "x", group)
    ferry.run(work, ranks_per_node=2)
    ferry.run(lambda group: staging.check_device(x, "x", group))
    asked = []
    monkeypatch.setattr(staging, "check_device", lambda x, name, group: asked.append(group))

    def dispatch(group):
        MoELayer(16, 12, 8, 2, group=group)(torch.zeros(2, 16))
        assert asked == [group]
    ferry.run(dispatch)
    staging.check_device(x, "x", SimpleNamespace(transport="mpi", size=4))
