"""Training runs that save and load, for the tests of saving: the same batches in any layout.

The names of what a rank holds (`Job.held`) come from the placement, not from what saving uses.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import ferry
from ferry.torch import (GradientCompressor, MoELayer, load_checkpoint, reduce_gradients,
                         save_checkpoint, split_world, update_selection_bias)

PROGRAMS = Path(__file__).parents[1] / "programs"
HIDDEN, EXPERTS, TOKENS = 8, 8, 24
#: Ranks, ranks of an expert-parallel group, and the rank of each expert in it.
LAYOUTS = {
    "ep4": (4, 4, [0, 0, 1, 1, 2, 2, 3, 3]),
    "ep2": (2, 2, [0, 0, 0, 0, 1, 1, 1, 1]),
    "ep1": (1, 1, [0] * 8),
    "ep2 x dp2": (4, 2, [0, 0, 0, 0, 1, 1, 1, 1]),
    "permuted": (2, 2, [1, 0, 0, 1, 0, 1, 1, 0]),
    "uneven": (4, 4, [2, 2, 0, 2, 2, 3, 2, 0]),
}


class Block(nn.Module):
    def __init__(self, group, placement=None, seed=1, gate="softmax", dtype=None,
                 num_experts=EXPERTS):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoELayer(HIDDEN, 6, num_experts, 2, 1, group=group, placement=placement, gate=gate,
                            seed=seed, dtype=dtype, wire_combine="f32")
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x + self.moe(torch.tanh(self.dense(x)))


class Job:
    """One rank of a training run in a layout."""

    def __init__(self, world, layout, seed=1, dtype=None, optimizer=None, compress=False):
        _, ep, self.rank_of = LAYOUTS[layout]
        self.world, self.split = world, split_world(world, ep)
        placement = ferry.Placement.from_map(self.rank_of)
        self.model = nn.Sequential(*[
            Block(self.split.expert_parallel, placement, 10 * seed + number, gate, dtype)
            for number, gate in enumerate(("softmax", "sigmoid"))])
        generator = torch.Generator().manual_seed(seed)  # threads share PyTorch's own
        with torch.no_grad():
            for block in self.model:
                for parameter in block.dense.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.compressor = GradientCompressor(self.model, block=32) if compress else None
        make = optimizer or (lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True))
        dense = [p for name, p in self.model.named_parameters() if ".experts." not in name]
        experts = [p for name, p in self.model.named_parameters() if ".experts." in name]
        self.optimizer = make([{"params": dense}, {"params": experts, "lr": 0.02 * seed}])

    def step(self, number):
        x = batch(number)
        begin, end = (TOKENS * place // self.world.size
                      for place in (self.world.rank, self.world.rank + 1))
        self.optimizer.zero_grad()
        self.model(x[begin:end]).square().mean().backward()
        reduce_gradients(self.model, self.world, self.split.expert_data_parallel,
                         compressor=self.compressor)
        self.optimizer.step()
        update_selection_bias(self.model, 0.01, self.world)

    def trained(self, steps=3):
        for number in range(steps):
            self.step(number)
        return self

    def loss(self):
        """Of the next global batch. All of it comes from rank 0, because not every BLAS gives a row
        of a dense layer the same bits in batches of other sizes."""
        self.model.eval()
        with torch.no_grad():
            out = self.model(batch(99)[:TOKENS if self.world.rank == 0 else 0])
        return float(out.double().square().mean()) if self.world.rank == 0 else None

    def held(self):
        """Every tensor of this rank as bytes, and every number, by a name of the whole model."""
        found, place = {}, self.split.expert_parallel.rank
        mine = [expert for expert, rank in enumerate(self.rank_of) if rank == place]

        def add(name, key, value):
            if isinstance(value, torch.Tensor) and ".experts." in name and value.dim() == 3:
                for expert, part in zip(mine, value.detach(), strict=True):
                    found[name, key, expert] = as_bytes(part)
            elif ".experts." not in name or mine:
                found[name, key] = as_bytes(value) if isinstance(value, torch.Tensor) else value
        for name, tensor in self.model.state_dict().items():
            add(name, "itself", tensor)
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                add(name, key, value)
        for number, group in enumerate(self.optimizer.param_groups):
            found[number] = {key: value for key, value in group.items() if key != "params"}
        return found


def batch(number):
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(number))


def as_bytes(tensor):
    tensor = tensor.detach().contiguous()
    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return str(tensor.dtype), tuple(tensor.shape), bits.numpy().tobytes()


def merged(by_rank):
    """What all ranks hold; copies are equal."""
    whole = {}
    for one in by_rank:
        for name, value in one.items():
            assert whole.setdefault(name, value) == value, name
    return whole


def run(body, layout="ep2"):
    return ferry.run(body, ranks_per_node=LAYOUTS[layout][0])


def saved(directory, layout="ep2", step=3, **options):
    """Trains and saves; returns what was held, and the loss of the next batch."""
    def body(world):
        job = Job(world, layout, **options).trained()
        save_checkpoint(directory, job.model, job.optimizer, group=world, step=step,
                        extra={"tokens": [1, 2.5, None]})
        return job.held(), job.loss()
    results = run(body, layout)
    return merged(one for one, _ in results), results[0][1]


def loaded(directory, layout="ep2", **options):
    def body(world):
        job = Job(world, layout, seed=2, **options)
        extra = load_checkpoint(directory, job.model, job.optimizer, group=world)
        assert extra == {"tokens": [1, 2.5, None], "step": 3}
        return job.held(), job.loss()
    results = run(body, layout)
    return merged(one for one, _ in results), results[0][1]


def refusals(directory, layout="ep2", error=ValueError, make=None, **options):
    """The text with which every rank refuses to load; model and optimiser stay as they were."""
    def body(world):
        job = Job(world, layout, seed=2, **options).trained(1)
        model, optimizer = make(job) if make else (job.model, job.optimizer)
        before = job.held()
        with pytest.raises(error) as said:
            load_checkpoint(directory, model, optimizer, group=world)
        assert job.held() == before
        return str(said.value)
    texts = set(run(body, layout))
    assert len(texts) == 1, texts
    return texts.pop()


def failing_saves(directory, error, layout="ep4", **options):
    """The text with which every rank refuses to save."""
    def body(world):
        job = Job(world, layout)
        with pytest.raises(error) as said:
            save_checkpoint(directory, job.model, job.optimizer, group=world,
                            **{"step": 8, **options})
        return str(said.value)
    texts = set(run(body, layout))
    assert len(texts) == 1, texts
    return texts.pop()


def entries(directory):
    return sorted(path.name for path in directory.iterdir())


def run_program(command, limit_s=110):
    said = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False,
                          stdin=subprocess.DEVNULL,
                          env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1",
                               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout
