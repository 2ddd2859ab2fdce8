"""Training of the language model over any split of the ranks: steps, validation, checkpoints, the log.

A step is the same whatever the split: the global batch is a function of (seed, step), rank r takes its
share of it, dense gradients are averaged over the world and those of experts over their copies.
Everything that a later step depends on is in the checkpoint, so a run that was killed goes on where
its last checkpoint was, also on another number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import torch
from torch import Tensor

import ferry
from ferry.torch import (clip_grad_norm_, load_checkpoint, reduce_gradients, save_checkpoint,
                         set_aux_loss_scale, split_world, update_selection_bias)

from language_model.corpus import Corpus
from language_model.model import LanguageModel, ModelConfig
from precision import LossScale

SCHEMA = "ferry.train/1"
#: Options that a run may change when it goes on: where it ends, with it the end of its learning
#: rate's cosine; how work is spread and rows travel; what is looked at.
MAY_CHANGE = {"steps", "expert_parallel", "placement", "log_every", "validate_every",
              "validation_windows", "save_every", "overlap", "exchange"}


@dataclass(frozen=True)
class TrainConfig:
    """What training does, beside the model.

    batch          sequences of a step, over all ranks
    batch_order    None, or a seed that permutes the sequences of every batch: the same sums in
                   another order, to see what rounding alone does
    expert_parallel   ranks that share one copy of the experts; None = all
    placement      "contiguous" blocks of experts, or "strided" over the ranks
    loss_scale, dynamic_loss_scale   see precision.LossScale
    """

    steps: int = 600
    batch: int = 32
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 1
    batch_order: int | None = None
    expert_parallel: int | None = None
    placement: str = "contiguous"
    loss_scale: float = 1.0
    dynamic_loss_scale: bool = False
    log_every: int = 10
    validate_every: int = 100
    validation_windows: int = 64
    save_every: int = 100

    def check(self) -> None:
        """Errors: ValueError that names the option"""
        for name in ("steps", "batch", "log_every", "validate_every", "validation_windows",
                     "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}; allowed: at least 1")
        if not self.loss_scale > 0:
            raise ValueError(f"loss_scale = {self.loss_scale}; allowed: above 0")


def rate_of(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def share(count: int, rank: int, size: int) -> slice:
    """Rank's part of `count` things; parts differ by at most one."""
    return slice(count * rank // size, count * (rank + 1) // size)


def placement_of(config: TrainConfig, num_experts: int, num_ranks: int) -> ferry.Placement | None:
    if config.placement == "contiguous":
        return None
    return ferry.Placement.from_map([expert % num_ranks for expert in range(num_experts)])


def summing_groups(group: ferry.Group, num_shared: int, copies: ferry.Group | None) -> tuple[Any, Any]:
    """Who sums dense gradients, and who those of an expert's copies: MPI under a launcher, else
    Ferry's own groups, which gather.

    Errors: RuntimeError where mpi4py was built for another MPI than the launcher's
    """
    if group.transport != "mpi":
        return group, copies
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    if world.Get_size() != group.size:
        raise RuntimeError(f"mpi4py sees {world.Get_size()} ranks, Ferry {group.size}; fix: start with "
                           "the mpirun of the MPI that mpi4py was built with")
    return world, None if copies is None else world.Split(group.rank % num_shared, group.rank)


def check_same_text(group: ferry.Group, corpus: Corpus) -> None:
    """Files of other hosts may be others, or left out.

    Errors: ValueError, on every rank
    """
    everyone = group.all_gather(json.dumps(corpus.fingerprint()).encode())
    for rank, text in enumerate(everyone):
        if text != everyone[0]:
            raise ValueError(f"the corpus of rank {rank} is {text.decode()}, that of rank 0 "
                             f"{everyone[0].decode()} (bytes and CRC-32); fix: give every host the "
                             "same files")


class Trainer:
    """One rank of a training run."""

    def __init__(self, group: ferry.Group, model_config: ModelConfig, config: TrainConfig,
                 corpus: Corpus) -> None:
        config.check()
        check_same_text(group, corpus)
        self.group, self.config, self.model_config, self.corpus = group, config, model_config, corpus
        num_shared = group.size if config.expert_parallel is None else config.expert_parallel
        split = split_world(group, num_shared)
        # Without experts every parameter is dense.
        self.world, self.copies = summing_groups(
            group, num_shared, split.expert_data_parallel if model_config.num_experts else None)
        self.model = LanguageModel(model_config, split.expert_parallel, placement_of(
            config, model_config.num_experts, num_shared) if model_config.num_experts else None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate,
                                           betas=(0.9, 0.95), weight_decay=config.weight_decay)
        self.loss_scale = LossScale(config.loss_scale, config.dynamic_loss_scale)
        self.step_number = 0

    def batch(self, step: int) -> Tensor:
        """This rank's sequences of a step, uint8 [share, context + 1]."""
        rows = self.corpus.batch(self.config.seed, step, self.config.batch, self.model_config.context)
        if self.config.batch_order is not None:
            rows = rows[np.random.default_rng(
                (self.config.batch_order, step)).permutation(len(rows))]
        return torch.from_numpy(rows[share(len(rows), self.group.rank, self.group.size)].copy())

    def backward(self, sequences: Tensor) -> tuple[float, dict[str, float]]:
        """Gradients of the mean over the global batch; this rank's share of the loss, and times."""
        began = time.perf_counter()
        # A mean over own tokens, weighted so that the mean over ranks is that of all tokens.
        weight = len(sequences) * self.group.size / self.config.batch
        set_aux_loss_scale(self.model, weight * self.loss_scale.value)
        loss = self.model.loss(sequences) * weight
        forward_done = time.perf_counter()
        (loss * self.loss_scale.value).backward()
        backward_done = time.perf_counter()
        for parameter in self.model.parameters():
            if parameter.grad is not None and self.loss_scale.value != 1.0:
                parameter.grad.mul_(1.0 / self.loss_scale.value)
        reduce_gradients(self.model, self.world, self.copies)
        return float(loss.detach()), {"forward_s": forward_done - began,
                                      "backward_s": backward_done - forward_done,
                                      "reduce_s": time.perf_counter() - backward_done}

    def step(self) -> dict[str, Any]:
        """One step of all ranks. Returns what the log keeps of it."""
        began = time.perf_counter()
        for options in self.optimizer.param_groups:
            options["lr"] = rate_of(self.config, self.step_number)
        self.optimizer.zero_grad()
        scale, stalled = self.loss_scale.value, self._stalled_s()
        loss, times = self.backward(self.batch(self.step_number))
        updating = time.perf_counter()
        norm = float(clip_grad_norm_(self.model, self.config.clip, self.world, self.copies))
        finite = math.isfinite(norm)
        if finite:  # the same on every rank
            self.optimizer.step()
        self._balance(finite)
        self.loss_scale.update(finite)
        total = float(self.group.all_reduce(np.array([loss]))[0]) / self.group.size
        self.step_number += 1
        ended = time.perf_counter()
        return {"step": self.step_number, "loss": total, "grad_norm": norm if finite else None,
                "taken": finite, "learning_rate": self.optimizer.param_groups[0]["lr"],
                "loss_scale": scale, "seconds": ended - began, **times,
                "update_s": ended - updating, "exchange_stall_s": self._stalled_s() - stalled}

    def _balance(self, taken: bool) -> None:
        """Moves the gates' bias; the choices of a step that is left out count nowhere."""
        if not taken:
            for layer in self.model.moe_layers():
                layer.gate.take_load()
        elif self.model_config.gate == "sigmoid" and self.model_config.balance:
            update_selection_bias(self.model, self.model_config.balance, self.world)

    def _stalled_s(self) -> float:
        """How long this rank stood still in waits of the exchange so far."""
        return sum(layer.dispatcher.exchange.stall_us for layer in self.model.moe_layers()) / 1e6

    def expert_counts(self) -> list[list[int]]:
        """[layers, experts]: tokens of all ranks that chose each expert in the last forward."""
        layers = self.model.moe_layers()
        if not layers:
            return []
        own = np.stack([layer.statistics.counts.numpy() for layer in layers])
        return self.group.all_reduce(own).tolist()

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Perplexity per byte of each domain, on bytes that are never trained on."""
        self.model.eval()
        num_windows = self.config.validation_windows
        own = share(num_windows, self.group.rank, self.group.size)
        sums = []
        for domain in self.corpus.domains:
            windows = torch.from_numpy(self.corpus.validation(domain, num_windows,
                                                              self.model_config.context)[own])
            sums.append(float(self.model.loss(windows)) * len(windows))
        self.model.train()
        totals = self.group.all_reduce(np.array(sums)) / num_windows
        return {domain: math.exp(total) for domain, total in zip(self.corpus.domains, totals)}

    def _described(self) -> dict[str, Any]:
        """What makes the run this run: a checkpoint of another one is refused."""
        kept = {name: value for config in (self.model_config, self.config)
                for name, value in asdict(config).items() if name not in MAY_CHANGE}
        return {**kept, "text": self.corpus.fingerprint()}

    def save(self, folder: Path) -> None:
        """Writes a checkpoint of this step; the last one stays good until it is complete."""
        save_checkpoint(folder, self.model, self.optimizer, group=self.group, step=self.step_number,
                        extra={"model": asdict(self.model_config), "run": self._described(),
                               "loss_scale": self.loss_scale.state()})

    def resume(self, folder: Path) -> bool:
        """Goes on at the last complete checkpoint of the folder, if it has one.

        Errors: ValueError (a checkpoint of a run with other options or text, or a damaged one)
        """
        try:
            extra = load_checkpoint(folder, self.model, self.optimizer, group=self.group)
        except FileNotFoundError:  # on every rank: no checkpoint yet
            return False
        own = self._described()
        for name, value in extra["run"].items():
            if own[name] != value:
                raise ValueError(f"{folder} is of a run with {name} = {value}, this one has "
                                 f"{own[name]}; fix: give the same option, or another --run")
        self.loss_scale.restore(extra["loss_scale"])
        self.step_number = extra["step"]
        return True


class Log:
    """JSON lines, written by rank 0. Lines after the step that a run resumes at are cut off; a log
    without a checkpoint to go on at is left beside the new one."""

    def __init__(self, path: Path | None, group: ferry.Group, resumed_step: int) -> None:
        self._file = None
        if path is None or group.rank != 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if not resumed_step and path.exists():
            os.replace(path, path.with_suffix(".older.jsonl"))
        elif path.exists():
            kept = [line for line in self._whole_lines(path)
                    if json.loads(line).get("step", 0) <= resumed_step]
        unfinished = path.with_suffix(".part")
        unfinished.write_text("".join(kept))
        os.replace(unfinished, path)
        self._file = path.open("a", buffering=1)

    @staticmethod
    def _whole_lines(path: Path) -> Iterator[str]:
        """A run that was killed may have left half a line."""
        return (line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n"))

    def write(self, kind: str, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"schema": SCHEMA, "kind": kind, **fields}) + "\n")
