"""Two processes of an MPI job save a model; copies of it, with another placement, load the same bits.

Usage: saving.py DIRECTORY
"""

import os
import sys
from pathlib import Path

import torch

import ferry
from ferry.torch import MoELayer, load_checkpoint, save_checkpoint

torch.set_num_threads(1)
DIRECTORY = Path(sys.argv[1])


def made(group, seed, placement=None):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8),
                                MoELayer(8, 4, 5, 2, group=group, seed=seed, placement=placement))
    return model, torch.optim.AdamW(model.parameters())


def by_expert(model, optimizer):
    """w2 and its moments of each expert of this rank."""
    experts = model[1].experts
    moment = optimizer.state[experts.w2]["exp_avg"]
    return {expert: (experts.w2[place].detach().numpy().tobytes(), moment[place].numpy().tobytes())
            for place, expert in enumerate(model[1].local_experts)}


with ferry.init() as group:
    rank = group.rank
    model, optimizer = made(group, 1)
    model(torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model[0].weight.fill_(3.5)  # reduce_gradients would make it equal on both ranks
    path = save_checkpoint(DIRECTORY, model, optimizer, group=group, step=7)
    assert sorted(file.name for file in path.iterdir()) == [
        "index.json", "rank-00000.npz", "rank-00001.npz"], path
    everything, other = {}, made(group.subgroup([rank]), 2)
    extra = load_checkpoint(DIRECTORY, *other, group=group)  # each rank has a copy of all experts
    assert extra == {"step": 7} and (other[0][0].weight == 3.5).all()
    everything = by_expert(*other)
    mine = by_expert(model, optimizer)
    assert len(mine) in (2, 3) and mine.items() <= everything.items()
    other = made(group, 3, ferry.Placement.from_map([1, 0, 1, 1, 0]))
    load_checkpoint(DIRECTORY, *other, group=group, step=7)
    swapped = by_expert(*other)
    assert set(swapped) == ({1, 4} if rank == 0 else {0, 2, 3})
    assert swapped.items() <= everything.items()
    # What one process cannot write or read, both refuse.
    try:
        save_checkpoint(DIRECTORY, model, optimizer, group=group, step=8,
                        extra={"bad": {1}} if rank == 1 else None)
        text = "saved"
    except ValueError as error:
        text = str(error)
    assert group.all_gather(text.encode()) == [text.encode()] * 2 and "on rank 1" in text, text
    group.barrier()
    if rank == 0:
        (path / "rank-00001.npz").write_bytes(b"nothing")
    group.barrier()
    try:
        load_checkpoint(DIRECTORY, *other, group=group)
        text = "loaded"
    except ValueError as error:
        text = str(error)
    assert group.all_gather(text.encode()) == [text.encode()] * 2 and "rank-00001" in text, text
    assert by_expert(*other) == swapped
# In one write: lines of several ranks must not run into each other.
os.write(1, f"rank {rank} is right\n".encode())
