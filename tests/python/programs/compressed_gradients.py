"""One rank reduces compressed gradients over three steps; all kinds of groups give the same bits.

Usage: compressed_gradients.py mpi                      under a launcher: over mpi4py and a ferry Group
       compressed_gradients.py gloo FILE RANK SIZE      the ranks meet by a file
"""

import datetime
import os
import sys
import zlib

import torch

import ferry
from ferry.torch import GradientCompressor, reduce_gradients

torch.set_num_threads(1)


def checksum(world, rank):
    """Of the gradients that a rank has after each step, bf16 ones among them."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 33), torch.nn.Linear(33, 7, dtype=torch.bfloat16))
    compressor, crc = GradientCompressor(model, block=32), 0
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + rank)
        compressor.loss_scale = 4.0 ** step
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        reduce_gradients(model, world, compressor=compressor)
        for parameter in model.parameters():
            crc = zlib.crc32(parameter.grad.float().numpy().tobytes(), crc)
    return crc


if __name__ == "__main__":
    if sys.argv[1] == "mpi":
        from mpi4py import MPI
        rank = MPI.COMM_WORLD.Get_rank()
        with ferry.init(MPI.COMM_WORLD) as group:
            crcs = {checksum(MPI.COMM_WORLD, rank), checksum(group, rank)}
    else:
        file, rank, size = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
        torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank,
                                             world_size=size, timeout=datetime.timedelta(seconds=60))
        crcs = {checksum(torch.distributed.group.WORLD, rank)}
        torch.distributed.destroy_process_group()
    # In one write: lines of several ranks must not run into each other.
    os.write(1, f"rank {rank}: {' '.join(map(str, sorted(crcs)))}\n".encode())
