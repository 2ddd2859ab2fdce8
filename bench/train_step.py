"""Whole training steps of the language model, with several exchanges side by side in one job.

    lab/run --name lab0 --ranks-per-host 2 -- python3 bench/train_step.py --corpus build/corpus

Each variant trains the model of examples/language_model with the same seed, text, gate, experts,
dense gradients (summed by MPI) and optimizer; they differ in how rows travel. In each repeat every
variant makes the same step, in turn, and losses must agree; a step lasts from a barrier to the end of
the last rank.

    flat, rank_dedup, node_gather, node_dedup   strategies of ferry.Exchange
    node_dedup_no_reuse   as node_dedup, with a new plan before combine and each way back, as in a
                          system that keeps no plan: four rounds of metadata per layer and step
    gloo                  torch.distributed, see peers/gloo_layer.py

Prints one JSON object, `ferry.train_step/1`. Times are medians over repeats; a speedup is the median
of the quotients of two steps that stand side by side. Of each variant:

    step_s, step_s_p10, step_s_p90, tokens_per_s
    forward_s, backward_s, reduce_s, update_s   parts of a step, as Trainer.step tells them; the mean
                         of the ranks. They contain
    exchange_s           time inside calls of the exchange: waiting, and copies and sums made there;
                         `exchange` has it by operation
    exchange_stall_s     part of it: standing still for metadata (null for gloo)
    cpu_s                processor time of all ranks, waits that poll included
    inter_node_bytes, busiest_node_bytes, ...   what the exchange sent to other nodes in a step: all
                         nodes, and the node that sent most
    link_s               the time that one link of this rate needs for busiest_node_bytes

Beside them: `gflop_per_s`, how fast a rank multiplies matrices: with a slow BLAS the share of links is
small; `load_of_ranks`, rows of the busiest rank over their mean. A model that was not trained sends most
tokens to a few experts, and a step then waits for their ranks: `--start` begins with a trained one.

What part of flat's step is spent between nodes, and what can be gained at most, is told twice:

- `link_share`: link_s of flat over its step. Where nothing is done while rows travel, this is what
  the links cost. A variant that sends b of flat's bytes can then be 1 / (1 - link_share * (1 - b))
  times as fast, its `ceiling_vs_flat`: all that it saves is the time of links. What it saves of
  copies, messages and waiting for other ranks can bring it above.
- `measured_share`, with `--free FILE`: 1 - step where links cost nothing / step. FILE has what the
  same command printed in a lab of `--rate none`. The time of dense gradients on the link, which every
  variant pays, is in it, and the noise between two jobs.

bench/train_step_rates.sh does this at several rates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Before NumPy and PyTorch load it: torch.set_num_threads does not reach an OpenBLAS with threads of its
# own, which then spin on the cores that other ranks need.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import ferry  # noqa: E402
from ferry.torch import dense_parameters  # noqa: E402

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE / "peers"), str(_HERE.parent / "examples")]

from gloo import join_gloo  # noqa: E402
from gloo_layer import GlooMoELayer  # noqa: E402
from language_model.corpus import Corpus  # noqa: E402
from language_model.model import ModelConfig  # noqa: E402
from language_model.training import TrainConfig, Trainer  # noqa: E402
from measured_exchange import OPERATIONS, MeasuredExchange  # noqa: E402

NO_REUSE = "node_dedup_no_reuse"
VARIANTS = ("flat", "rank_dedup", "node_gather", "node_dedup", NO_REUSE, "gloo")
#: How far losses may differ from the first variant's: sums in another order round differently.
LOSS_TOLERANCE = 1e-4
PARTS = ("forward_s", "backward_s", "reduce_s", "update_s")
BYTES = ("payload_bytes", "metadata_bytes", "control_bytes")
#: What is kept of a step, on each rank.
COLUMNS = ("step_s", *PARTS, *BYTES, "metadata_rounds", "host_stalls", "exchange_stall_s", *OPERATIONS,
           "cpu_s")
#: Sizes: option, default, meaning.
SIZES = (("hidden", 256, "width of a token"), ("intermediate", 384, "width of an expert"),
         ("num_layers", 2, "blocks"), ("num_heads", 4, "heads of attention"),
         ("context", 128, "tokens of a sequence"), ("batch", 16, "sequences of a step, all ranks"),
         ("num_experts", 64, "experts of all ranks"), ("num_topk", 8, "experts of a token"),
         ("num_shared_experts", 1, "experts of every token"),
         ("overlap", 1, "chunks of Ferry's layers"), ("seed", 1, "of weights and batches"))


class Variant:
    """One way to carry rows: a model of its own, and what its steps took."""

    def __init__(self, name: str, group: ferry.Group, options: argparse.Namespace,
                 corpus: Corpus) -> None:
        self.name, self._group = name, group
        strategy = {NO_REUSE: "node_dedup", "gloo": "flat"}.get(name, name)
        sizes = {size: getattr(options, size) for size, _, _ in SIZES if size != "batch"}
        self.trainer = Trainer(
            group, ModelConfig(**sizes, exchange={"strategy": strategy}),
            TrainConfig(steps=options.train_first + options.warm_up + options.repeat,
                        batch=options.batch, seed=options.seed), corpus)
        if options.start is not None:
            self._start_from(options.start, options.train_first)
        self._exchanges = self._prepare()
        self.losses: list[float] = []
        self.steps: list[np.ndarray] = []  # of the timed ones: [ranks, COLUMNS]

    def _start_from(self, folder: Path, num_steps: int) -> None:
        """Goes on at the checkpoint in the folder; whoever finds none trains so far and leaves it."""
        if self.trainer.resume(folder):
            return
        while self.trainer.step_number < num_steps:
            self.trainer.step()
        self.trainer.save(folder)

    def _prepare(self) -> list[Any]:
        """Puts this variant's exchanges into the layers; returns them."""
        model, topology = self.trainer.model, self._group.topology
        if self.name == "gloo":
            node_of = [topology.node_of(rank) for rank in range(topology.num_ranks)]
            for block in model.blocks:
                block.feed_forward = GlooMoELayer(block.feed_forward, node_of)
            return [block.feed_forward.exchange for block in model.blocks]
        for layer in model.moe_layers():
            layer.dispatcher.exchange = MeasuredExchange(layer.dispatcher.exchange,
                                                         keeps_plans=self.name != NO_REUSE)
        return [layer.dispatcher.exchange for layer in model.moe_layers()]

    def _counted(self) -> np.ndarray:
        """The columns from BYTES on, of this rank, so far."""
        own = self._exchanges
        if self.name == "gloo":
            sent = {name: sum(getattr(e, name, 0) for e in own) for name in BYTES}
            stalls = [0, 0]
        else:
            sent = own[0].group.counters()  # of the group that this variant's layers share
            stalls = [sum(e.host_stalls for e in own), sum(e.stall_us for e in own) / 1e6]
        return np.array([*(sent[name] for name in BYTES), sum(e.metadata_rounds for e in own), *stalls,
                         *(sum(e.clock.seconds[name] for e in own) for name in OPERATIONS),
                         time.process_time()], float)

    def step(self, keep: bool) -> None:
        before = self._counted()
        self._group.barrier()
        began = time.perf_counter()
        record = self.trainer.step()
        took = time.perf_counter() - began
        counted = self._counted() - before
        own = np.array([took, *(record[part] for part in PARTS), *counted])
        ranks = np.stack(self._group.all_gather(own))
        self.losses.append(record["loss"])
        if keep:
            self.steps.append(ranks)

    def load_of_ranks(self) -> float | None:
        """Rows of the busiest rank's experts over the mean of ranks, in the last step; of all layers."""
        counts = np.array(self.trainer.expert_counts())  # [layers, experts], in blocks by rank
        if not counts.size:
            return None
        rows = counts.reshape(len(counts), self._group.size, -1).sum(2)
        return round(float((rows.max(1) / rows.mean(1)).mean()), 3)

    def seconds(self) -> np.ndarray:
        """Of each timed step, until the last rank's end."""
        return np.stack(self.steps)[:, :, 0].max(1)

    def summary(self, tokens: int) -> dict[str, Any]:
        values = dict(zip(COLUMNS, np.moveaxis(np.stack(self.steps), 2, 0)))  # [steps, ranks] each

        def median_s(name: str) -> float:
            return round(float(np.median(values[name].mean(1))), 6)
        topology = self._group.topology
        node_of = np.array([topology.node_of(rank) for rank in range(topology.num_ranks)])
        wire = sum(values[name] for name in BYTES).mean(0)  # [ranks]
        p10, median, p90 = (round(float(p), 6) for p in np.percentile(self.seconds(), (10, 50, 90)))
        is_gloo = self.name == "gloo"
        operations = {f"{name}_s": median_s(name) for name in OPERATIONS}
        return {"step_s": median, "step_s_p10": p10, "step_s_p90": p90,
                "tokens_per_s": round(tokens / median, 1), **{part: median_s(part) for part in PARTS},
                "exchange_s": round(sum(operations.values()), 6), "exchange": operations,
                "exchange_stall_s": None if is_gloo else median_s("exchange_stall_s"),
                "cpu_s": round(float(np.median(values["cpu_s"].sum(1))), 4),
                "inter_node_bytes": round(wire.sum()),
                **{name: round(values[name].sum(1).mean()) for name in BYTES},
                "busiest_node_bytes": round(max(wire[node_of == n].sum() for n in set(node_of))),
                "metadata_rounds_per_layer":
                    round(float(values["metadata_rounds"].mean()) / len(self._exchanges), 3),
                "host_stalls": None if is_gloo else round(float(values["host_stalls"].mean()), 2)}


def gflop_per_s(group: ferry.Group) -> float:
    """Of a product of matrices, on all ranks at once: the mean of the ranks."""
    left, right = torch.rand(2, 512, 512)
    taken = []
    for _ in range(5):
        group.barrier()
        began = time.perf_counter()
        torch.mm(left, right)
        taken.append(time.perf_counter() - began)
    return float(group.all_reduce(np.array([2 * 512 ** 3 / min(taken)]))[0]) / group.size / 1e9


def compare(variants: list[Variant]) -> float:
    """The largest relative difference of the last step's losses from the first variant's.

    Errors: SystemExit, on every rank
    """
    first, largest = variants[0].losses[-1], 0.0
    for variant in variants[1:]:
        difference = abs(variant.losses[-1] - first) / abs(first)
        if not difference <= LOSS_TOLERANCE:
            raise SystemExit(
                f"train_step: step {len(variant.losses)}: the loss of {variant.name} is "
                f"{variant.losses[-1]:.7g}, that of {variants[0].name} {first:.7g}; allowed: a "
                f"relative difference of {LOSS_TOLERANCE}")
        largest = max(largest, difference)
    return largest


def speedups(times: dict[str, np.ndarray]) -> dict[str, Any]:
    """How many times as fast each variant is as flat, as gloo, and as one that keeps no plans."""
    def ratio(slow: str, fast: str) -> float:
        return round(float(np.median(times[slow] / times[fast])), 4)
    found: dict[str, Any] = {
        f"speedup_vs_{base}": {name: ratio(base, name) for name in times if name != base}
        for base in ("flat", "gloo") if base in times}
    if "node_dedup" in times and NO_REUSE in times:
        found["speedup_of_reuse"] = ratio(NO_REUSE, "node_dedup")
    return found


def shares(results: dict[str, dict[str, Any]], link_bits_per_s: float | None,
           free: dict[str, Any] | None) -> dict[str, Any]:
    """What links cost, as the head of this file defines it; adds to `results` what is a variant's."""
    for name, result in results.items():
        if link_bits_per_s:
            result["link_s"] = round(result["busiest_node_bytes"] * 8 / link_bits_per_s, 6)
        if free is not None and name in free["variants"]:
            result["measured_share"] = round(
                1 - free["variants"][name]["step_s"] / result["step_s"], 4)
    flat = results.get("flat", {})
    told = {"link_share": None, "measured_share": flat.get("measured_share")}
    if "link_s" in flat:
        share = told["link_share"] = round(flat["link_s"] / flat["step_s"], 4)
        for result in results.values():
            saved = 1 - result["busiest_node_bytes"] / flat["busiest_node_bytes"]
            result["ceiling_vs_flat"] = round(1 / (1 - share * saved), 4)
    return told


def measure(group: ferry.Group, options: argparse.Namespace) -> dict[str, Any]:
    if options.num_experts % group.size:
        raise SystemExit(f"train_step: {options.num_experts} experts on {group.size} ranks; allowed: "
                         "as many on every rank; fix: --num-experts")
    corpus = Corpus(options.corpus)
    variants = [Variant(name, group, options, corpus) for name in options.variants]
    largest = 0.0
    for step in range(-options.warm_up, options.repeat):
        first = step % len(variants)  # so that no variant always comes first, or last
        for variant in variants[first:] + variants[:first]:
            variant.step(keep=step >= 0)
        largest = max(largest, compare(variants))
    tokens = options.batch * options.context
    results = {variant.name: variant.summary(tokens) for variant in variants}
    rate = float(os.environ.get("FERRY_LAB_LINK_RATE") or 0) or None
    free = json.loads(options.free.read_text()) if options.free is not None else None
    dense = dense_parameters(variants[0].trainer.model)
    return {"schema": "ferry.train_step/1", "num_nodes": group.nodes, "num_ranks": group.size,
            "link_bits_per_s": rate, "tokens_per_step": tokens,
            **{name: getattr(options, name) for name, _, _ in SIZES}, "repeat": options.repeat,
            "train_first": 0 if options.start is None else options.train_first,
            "gflop_per_s": round(gflop_per_s(group), 2), "load_of_ranks": variants[0].load_of_ranks(),
            "dense_gradient_bytes": sum(4 * parameter.numel() for parameter in dense),
            "verified": True, "largest_loss_difference": largest,
            "losses": [variants[0].losses[0], variants[0].losses[-1]],
            **shares(results, rate, free),
            **speedups({variant.name: variant.seconds() for variant in variants}),
            "variants": results}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--free", type=Path, help="what this printed where links cost nothing")
    parser.add_argument("--nodes", type=int, help="virtual nodes; default: the machines")
    parser.add_argument("--start", type=Path,
                        help="folder of the checkpoint to start from; made where it has none")
    parser.add_argument("--train-first", type=int, default=200,
                        help="steps until that checkpoint is made")
    parser.add_argument("--repeat", type=int, default=18, help="timed steps of each variant")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before, not timed")
    for name, default, meaning in SIZES:
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help=meaning)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # ranks share the cores
    shape = None
    if options.nodes is not None:
        from mpi4py import MPI
        shape = ferry.Topology.uniform(options.nodes, MPI.COMM_WORLD.Get_size() // options.nodes)
    with ferry.init(topology=shape) as group:
        if "gloo" in options.variants:
            join_gloo(group)
        result = measure(group, options)
        if group.rank == 0:
            print(json.dumps(result), flush=True)
        if "gloo" in options.variants:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
