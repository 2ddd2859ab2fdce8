"""Trains a small Mixture-of-Experts language model on real text, over any number of ranks and hosts.

    python3 examples/language_model/corpus.py              # once: makes the text
    python3 examples/train_lm.py --ranks 4                 # ranks are threads of one process
    mpirun -n 4 --oversubscribe --bind-to none python3 examples/train_lm.py     # or processes

`--run DIR` keeps the log, checkpoints and routing of a run; the same command again goes on where it
was. docs/training.md shows what comes out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # ranks share the cores
import torch
from tqdm import tqdm

import ferry

from language_model.corpus import Corpus
from language_model.model import ModelConfig
from language_model.recording import record_domains
from language_model.training import Log, TrainConfig, Trainer
from precision import DTYPES, STREAM_FORMATS

EXCHANGE_OPTIONS = ("strategy", "weights", "wire_dispatch", "wire_combine", "wire_combine_backward",
                    "wire_dispatch_backward")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, help="ranks as threads; default: one, or the launcher's")
    parser.add_argument("--nodes", type=int,
                        help="virtual nodes that the ranks are split over; default: the machines")
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"))
    parser.add_argument("--domains", nargs="+", help="which files of the corpus; default: all")
    parser.add_argument("--run", type=Path, help="folder of the log, checkpoints and routing traces")
    parser.add_argument("--record-windows", type=int, default=0,
                        help="validation windows of each domain whose routing is recorded at the end")
    choices = {"gate": ["sigmoid", "softmax"], "placement": ["contiguous", "strided"],
               "gate_dtype": list(DTYPES), "row_dtype": list(DTYPES), "stream_format": STREAM_FORMATS}
    for config in (ModelConfig, TrainConfig):
        for option in fields(config):
            if option.name in ("exchange", "dynamic_loss_scale", "seed"):
                continue
            kind = type(option.default) if option.default is not None else int
            parser.add_argument("--" + option.name.replace("_", "-"), type=kind,
                                default=option.default, choices=choices.get(option.name))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dynamic-loss-scale", action="store_true")
    for option in EXCHANGE_OPTIONS:
        parser.add_argument("--" + option.replace("_", "-"), help="of ferry.Exchange")
    options = parser.parse_args(arguments)
    if options.nodes is not None and options.nodes < 1:
        parser.error(f"--nodes {options.nodes}: at least 1")
    if options.ranks is not None and (options.ranks < 1 or options.ranks % (options.nodes or 1)):
        parser.error(f"--ranks {options.ranks} --nodes {options.nodes or 1}: as many on every node")
    if options.record_windows and options.run is None:
        parser.error("--record-windows needs --run, where the traces are written")
    try:
        for config in configs(options):
            config.check()
    except ValueError as error:
        parser.error(str(error))
    return options


def configs(options: argparse.Namespace) -> tuple[ModelConfig, TrainConfig]:
    exchange = {name: getattr(options, name) for name in EXCHANGE_OPTIONS if getattr(options, name)}
    given = vars(options)
    return (ModelConfig(**{f.name: given[f.name] for f in fields(ModelConfig) if f.name != "exchange"},
                        exchange=exchange),
            TrainConfig(**{f.name: given[f.name] for f in fields(TrainConfig)}))


def train(group: ferry.Group, options: argparse.Namespace) -> dict[str, float]:
    """One rank's run. Returns the last perplexities, by domain."""
    model_config, config = configs(options)
    trainer = Trainer(group, model_config, config, Corpus(options.corpus, options.domains))
    if options.run is not None:
        trainer.resume(options.run / "checkpoints")
    log = Log(options.run and options.run / "log.jsonl", group, trainer.step_number)
    log.write("run", step=trainer.step_number, model=asdict(model_config), train=asdict(config),
              num_ranks=group.size, num_nodes=group.nodes, domains=trainer.corpus.domains)
    tokens = config.batch * model_config.context
    bar = tqdm(total=config.steps, initial=trainer.step_number, unit="step", disable=group.rank != 0,
               file=sys.stderr, mininterval=1)
    perplexity: dict[str, float] = {}
    began, first = time.perf_counter(), trainer.step_number
    while trainer.step_number < config.steps:
        record = trainer.step()
        step = trainer.step_number
        if step % config.log_every == 0 or step <= 20:
            counts = trainer.expert_counts() if step % config.log_every == 0 else None
            log.write("step", tokens_per_s=tokens / record["seconds"], expert_counts=counts, **record)
        rate = tokens * (step - first) / (time.perf_counter() - began)
        bar.set_postfix_str(f"loss {record['loss']:.3f}, {rate:.0f} tokens/s")
        bar.update()
        if step % config.validate_every == 0 or step == config.steps:
            perplexity = trainer.validate()
            log.write("validation", step=step, perplexity=perplexity,
                      seconds=time.perf_counter() - began)
        if options.run is not None and (step % config.save_every == 0 or step == config.steps):
            trainer.save(options.run / "checkpoints")
    bar.close()
    if options.record_windows:
        record_domains(trainer.model, group, trainer.corpus, options.record_windows,
                       options.run / "routing")
    return perplexity or trainer.validate()


def virtual_nodes(num_nodes: int | None) -> ferry.Topology | None:
    """The launcher's processes over so many nodes.

    Errors: ValueError (another number on each)
    """
    if num_nodes is None:
        return None
    from mpi4py import MPI
    num_ranks = MPI.COMM_WORLD.Get_size()
    if num_ranks % num_nodes:
        raise ValueError(f"{num_ranks} processes --nodes {num_nodes}: as many on every node")
    return ferry.Topology.uniform(num_nodes, num_ranks // num_nodes)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)  # ranks share the cores
    if options.ranks is not None:
        nodes = options.nodes or 1
        perplexity, rank = ferry.run(train, nodes, options.ranks // nodes, args=(options,))[0], 0
    else:
        with ferry.init(topology=virtual_nodes(options.nodes)) as group:
            perplexity, rank = train(group, options), group.rank
    if rank == 0:
        for domain, value in perplexity.items():
            print(f"{domain}: perplexity per byte {value:.3f}")


if __name__ == "__main__":
    main()
