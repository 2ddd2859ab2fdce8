"""Ferry's exchange beside the same one on torch.distributed with gloo: one layer, forward and back.

    mpirun -n 4 python3 bench/peers/gloo.py --tokens 1024 --hidden 2048

Both move the same rows of the same routing in turn, repeat by repeat, from a common start to the end
of the last rank; the experts are a copy that is not timed. Outputs and gradients are compared before
anything is told. Prints one JSON object: medians in microseconds and their ratio.
"""

from __future__ import annotations

import argparse
import json
import socket
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ferry
from gloo_exchange import GlooExchange

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def own_address(group: ferry.Group) -> str:
    """An address of this host that the others reach; on one host the loopback."""
    return "127.0.0.1" if group.nodes == 1 else socket.gethostbyname(socket.gethostname())


def join_gloo(group: ferry.Group) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        offer = f"{own_address(group)} {free.getsockname()[1]}".encode()
    host, port = group.all_gather(offer)[0].decode().split()
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=group.rank,
                            world_size=group.size)


class Ferry:
    """The same four steps with Ferry."""

    def __init__(self, group: ferry.Group, num_experts: int, hidden: int, dtype: str) -> None:
        self.exchange = ferry.Exchange(group, ferry.Placement.contiguous(num_experts, group.size),
                                       hidden, dtype)

    def forward(self, topk_idx: Tensor, topk_weights: Tensor, x: Tensor) -> Tensor:
        self.plan = self.exchange.plan(topk_idx, topk_weights)
        self.rows = self.exchange.dispatch(self.plan, x)
        self.y = self.exchange.output(self.plan)
        return torch.from_dlpack(self.rows)

    def finish(self, out: Tensor, grad_out: Tensor, grad_weights: Tensor, grad_x: Tensor) -> None:
        self.exchange.combine(self.plan, self.y, out)
        grad_y = self.exchange.combine_backward(self.plan, grad_out, self.y, grad_weights)
        self.exchange.dispatch_backward(self.plan, grad_y, grad_x=grad_x)


def timed(group: ferry.Group, call) -> float:
    """Microseconds from a common start to the end of the last rank."""
    group.barrier()
    start = time.perf_counter()
    call()
    return float(group.all_reduce(np.array([(time.perf_counter() - start) * 1e6]), "max")[0])


def close(name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-20)
    if not error <= tolerance:
        raise SystemExit(f"{name}: relative difference {error:.3g}; allowed: {tolerance}")


def compare(group: ferry.Group, options: argparse.Namespace) -> dict:
    dtype = _DTYPES[options.dtype]
    random = torch.Generator().manual_seed(options.seed * 1000 + group.rank)
    scores = torch.rand(options.tokens, options.experts, generator=random)
    topk_weights, topk_idx = torch.softmax(scores, 1).topk(options.topk, dim=1)
    topk_weights = topk_weights / topk_weights.sum(1, keepdim=True)
    x, grad_out = (torch.randn(options.tokens, options.hidden, generator=random).to(dtype)
                   for _ in range(2))
    out, grad_x = torch.empty_like(x), torch.empty_like(x)
    grad_weights = torch.empty_like(topk_weights)
    ours = Ferry(group, options.experts, options.hidden, options.dtype)
    theirs = GlooExchange(options.experts, options.hidden, dtype)
    factor = torch.linspace(0.5, 1.5, options.hidden).to(dtype)
    times = {"ferry": [], "gloo": []}
    for repeat in range(-1, options.repeat):
        rows = []
        forward_us = timed(group, lambda: rows.append(ours.forward(topk_idx, topk_weights, x)))
        torch.mul(rows[0], factor, out=torch.from_dlpack(ours.y))
        back_us = timed(group, lambda: ours.finish(out, grad_out, grad_weights, grad_x))

        their_rows, result = [], []

        def their_forward() -> None:
            theirs.plan(topk_idx, topk_weights)
            their_rows.append(theirs.dispatch(x))

        def their_rest() -> None:
            result.append(theirs.combine(their_y))
            grad_y, their_grad_weights = theirs.combine_backward(grad_out)
            result.extend([their_grad_weights, theirs.dispatch_backward(grad_y)])

        their_forward_us = timed(group, their_forward)
        their_y = their_rows[0] * factor
        their_back_us = timed(group, their_rest)
        tolerance = 1e-5 if options.dtype == "f32" else 2e-2
        close("out", out, result[0], tolerance)
        close("grad_weights", grad_weights, result[1], tolerance)
        close("grad_x", grad_x, result[2], tolerance)
        if repeat < 0:
            continue
        times["ferry"].append(forward_us + back_us)
        times["gloo"].append(their_forward_us + their_back_us)
    medians = {name: float(np.median(values)) for name, values in times.items()}
    return {"schema": "ferry.peers/1", "num_ranks": group.size, "num_nodes": group.nodes,
            "tokens_per_rank": options.tokens, "hidden": options.hidden, "num_topk": options.topk,
            "num_experts": options.experts, "dtype": options.dtype, "repeat": options.repeat,
            "verified": True, "ferry_us": round(medians["ferry"]),
            "gloo_us": round(medians["gloo"]),
            "speedup_vs_gloo": round(medians["gloo"] / medians["ferry"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("tokens", 512), ("hidden", 2048), ("topk", 8), ("experts", 64),
                          ("repeat", 7), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with ferry.init() as group:
        join_gloo(group)
        result = compare(group, options)
        if group.rank == 0:
            print(json.dumps(result), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
