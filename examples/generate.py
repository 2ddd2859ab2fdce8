"""Decodes text from a checkpoint of train_lm.py, the experts spread over any number of ranks.

    python3 examples/generate.py RUN                              # one process
    mpirun -n 4 --oversubscribe python3 examples/generate.py RUN --prompt "The whale" --tokens 200

Prompts are shared out over the ranks; a rank without one lends its experts. Batches are small, so rows
leave with their metadata (`plan_and_dispatch`). Greedy, or sampled with --temperature from (seed,
prompt, position), so the text does not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # ranks share the cores
import numpy as np
import torch

import ferry
from ferry.torch import checkpoint_extra, load_checkpoint

from language_model.model import Cache, LanguageModel, ModelConfig
from language_model.training import share

PROMPTS = ["And it came to pass, that ", "The whale ", "My fellow Americans, ", "In the beginning "]


def choose(logits: torch.Tensor, temperature: float, draws: list[float]) -> list[int]:
    """A byte for each row of logits [B, 256]; draws are uniform in 0..1, one per row."""
    if temperature == 0:
        return logits.argmax(-1).tolist()
    shares = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
    return [min(255, int(torch.searchsorted(row, draw))) for row, draw in zip(shares, draws)]


@torch.no_grad()
def decode(model: LanguageModel, group: ferry.Group, prompts: list[bytes],
           options: argparse.Namespace) -> tuple[list[bytes], list[float]]:
    """This rank's texts, and the seconds of each step; all ranks make equally many steps."""
    own = range(len(prompts))[share(len(prompts), group.rank, group.size)]
    texts = [bytearray(prompts[number]) for number in own]
    known, longest = min(map(len, prompts)), max(map(len, prompts))
    cache, seconds = Cache(model.config), []
    ahead = torch.tensor([list(text[:known]) for text in texts]).long().view(len(own), known)
    for position in range(known, longest + options.tokens):
        group.barrier()
        began = time.perf_counter()
        logits = model(ahead, cache)[:, -1]
        draws = [np.random.default_rng((options.seed, number, position)).random() for number in own]
        chosen = choose(logits, options.temperature, draws)
        for row, (number, text) in enumerate(zip(own, texts)):
            prompt = prompts[number]
            if position < len(prompt):
                chosen[row] = prompt[position]
            elif position < len(prompt) + options.tokens:
                text.append(chosen[row])
        ahead = torch.tensor(chosen).long().view(len(own), 1)
        seconds.append(time.perf_counter() - began)
    return [bytes(text) for text in texts], seconds


def generate(group: ferry.Group, options: argparse.Namespace) -> dict:
    """One rank's part. Returns all texts, and figures over all ranks."""
    folder = options.run / "checkpoints"
    model = LanguageModel(ModelConfig(**checkpoint_extra(folder)["model"]), group).eval()
    load_checkpoint(folder, model, group=group)
    for layer in model.moe_layers():
        layer.plan_and_dispatch = True
    prompts = [prompt.encode() for prompt in options.prompt]
    texts, seconds = decode(model, group, prompts, options)
    slowest = group.all_reduce(np.array(seconds), "max")
    later = slowest[1:] if len(slowest) > 1 else slowest  # the first step takes the prompts in
    everything = [bytes.fromhex(text) for part in group.all_gather(
        " ".join(text.hex() for text in texts).encode()) for text in part.decode().split()]
    return {"schema": "ferry.generate/1", "num_ranks": group.size, "num_nodes": group.nodes,
            "tokens_per_s": len(prompts) * options.tokens / float(slowest.sum()),
            "p50_ms": float(np.percentile(later, 50)) * 1e3,
            "p99_ms": float(np.percentile(later, 99)) * 1e3,
            "texts": [text.decode(errors="replace") for text in everything]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the --run folder of train_lm.py")
    parser.add_argument("--ranks", type=int, help="ranks as threads; default: one, or the launcher's")
    parser.add_argument("--prompt", nargs="+", default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=100, help="bytes to add to each prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    options = parser.parse_args()
    if options.tokens < 1 or options.temperature < 0 or not all(options.prompt):
        parser.error("allowed: --tokens of at least 1, --temperature of at least 0, prompts with text")
    torch.set_num_threads(1)  # ranks share the cores
    if options.ranks is not None:
        result, rank = ferry.run(generate, 1, options.ranks, args=(options,))[0], 0
    else:
        with ferry.init() as group:
            result, rank = generate(group, options), group.rank
    if rank != 0:
        return
    if options.json:
        print(json.dumps(result))
        return
    for text in result["texts"]:
        print(text, end="\n\n")
    print(f"{result['num_ranks']} ranks: {result['tokens_per_s']:.0f} tokens/s, "
          f"per token p50 {result['p50_ms']:.1f} ms, p99 {result['p99_ms']:.1f} ms")


if __name__ == "__main__":
    main()
