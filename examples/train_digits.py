"""Trains a small residual convolutional classifier with Mixtures of Experts on 8 x 8 images of digits.

    apt-get install python3-sklearn
    python3 examples/train_digits.py --ranks 4 --nodes 2 --wire-dispatch int8 --wire-combine bf16
    mpirun -n 4 --oversubscribe --bind-to none python3 examples/train_digits.py   # or processes

You learn how ferry.torch.MoELayer stands in a model that is no transformer: a token is a place of the image. The
options of precision are those of train_lm.py; docs/precision.md shows what they do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict, fields
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # ranks share the cores
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

import ferry
from ferry.torch import clip_grad_norm_, reduce_gradients, set_aux_loss_scale

from digits_model import Classifier, Config
from precision import DTYPES, STREAM_FORMATS, LossScale

_NUM_TEST = 397  # the last images, which other people wrote
EXCHANGE_OPTIONS = ("strategy", "wire_dispatch", "wire_combine", "wire_combine_backward",
                    "wire_dispatch_backward")


class Digits:
    """The images, in [0, 1], and what they show."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        images = torch.from_numpy(images.reshape(-1, 8, 8) / 16).float()
        labels = torch.from_numpy(labels)
        self.train = images[:-_NUM_TEST], labels[:-_NUM_TEST]
        self.test = images[-_NUM_TEST:], labels[-_NUM_TEST:]


def share(count: int, group: ferry.Group) -> slice:
    return slice(count * group.rank // group.size, count * (group.rank + 1) // group.size)


def batches(config: Config, num_images: int):
    """Indices of each step's images: epochs of another order each, the same on every rank."""
    random = np.random.default_rng(config.seed)
    order = np.empty(0, dtype=np.int64)
    for step in range(config.steps):
        while len(order) < config.batch:
            order = np.concatenate([order, random.permutation(num_images)])
        batch, order = order[:config.batch], order[config.batch:]
        if config.batch_order is not None:
            batch = np.random.default_rng((config.batch_order, step)).permutation(batch)
        yield batch


@torch.no_grad()
def evaluate(model: Classifier, group: ferry.Group, images: Tensor, labels: Tensor) -> dict:
    """Mean cross-entropy and accuracy over all images."""
    own = share(len(images), group)
    model.eval()
    logits, labels = model(images[own]), labels[own]
    model.train()
    sums = [float(functional.cross_entropy(logits, labels, reduction="sum")),
            float((logits.argmax(-1) == labels).sum())]
    loss, right = group.all_reduce(np.array(sums)) / len(images)
    return {"loss": loss, "accuracy": right}


def train(group: ferry.Group, config: Config) -> dict:
    """One rank's run. Returns what came out on the images of training and of test."""
    digits, model = Digits(), Classifier(config, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    scale = LossScale(config.loss_scale, config.dynamic_loss_scale)
    taken = 0
    for step, batch in enumerate(batches(config, len(digits.train[0]))):
        for options in optimizer.param_groups:
            options["lr"] = config.learning_rate * (0.55 + 0.45 * math.cos(
                math.pi * step / config.steps))
        own = torch.from_numpy(batch[share(len(batch), group)])
        weight = len(own) * group.size / len(batch)  # the mean over ranks is that of all images
        set_aux_loss_scale(model, weight * scale.value)
        loss = functional.cross_entropy(model(digits.train[0][own]), digits.train[1][own])
        optimizer.zero_grad()
        (loss * weight * scale.value).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / scale.value)
        reduce_gradients(model, group)
        finite = math.isfinite(float(clip_grad_norm_(model, 1.0, group)))  # the same on every rank
        if finite:
            optimizer.step()
            taken += 1
        scale.update(finite)
    return {"train": evaluate(model, group, *digits.train),
            "test": evaluate(model, group, *digits.test), "steps_taken": taken}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, help="ranks as threads; default: one, or the launcher's")
    parser.add_argument("--nodes", type=int, default=1, help="virtual nodes that --ranks are split over")
    parser.add_argument("--run", type=Path, help="folder of the log")
    choices = {"gate_dtype": list(DTYPES), "row_dtype": list(DTYPES), "stream_format": STREAM_FORMATS}
    for option in fields(Config):
        flag = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            parser.add_argument(flag, action="store_true")
        elif option.name != "exchange":
            parser.add_argument(flag, type=int if option.default is None else type(option.default),
                                default=option.default, choices=choices.get(option.name))
    for name in EXCHANGE_OPTIONS:
        parser.add_argument("--" + name.replace("_", "-"), help="of ferry.Exchange")
    options = parser.parse_args()
    if options.ranks is not None and (options.ranks < 1 or options.nodes < 1
                                      or options.ranks % options.nodes):
        parser.error(f"--ranks {options.ranks} --nodes {options.nodes}: as many on every node")
    return options


def main() -> None:
    options = parse()
    given = vars(options)
    config = Config(**{f.name: given[f.name] for f in fields(Config) if f.name != "exchange"},
                    exchange={name: given[name] for name in EXCHANGE_OPTIONS if given[name]})
    torch.set_num_threads(1)  # ranks share the cores
    if options.ranks is not None:
        rank, result = 0, ferry.run(train, options.nodes, options.ranks // options.nodes,
                                    args=(config,))[0]
    else:
        with ferry.init() as group:
            rank, result = group.rank, train(group, config)
    if rank != 0:
        return
    for images in ("train", "test"):
        print(f"{images}: loss {result[images]['loss']:.4f}, right {result[images]['accuracy']:.1%}")
    if options.run is not None:
        options.run.mkdir(parents=True, exist_ok=True)
        lines = [{"kind": "run", "config": asdict(config)},
                 {"kind": "validation", "step": config.steps, **result}]
        (options.run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
