"""The routing of a trained model as Ferry's traces: what `ferry bench --trace` and `ferry plan` read."""

from __future__ import annotations

from pathlib import Path

import torch

import ferry
from ferry.torch import record_routing

from language_model.corpus import Corpus
from language_model.model import LanguageModel

#: Windows of one forward: enough that recording is quick.
_WINDOWS_AT_ONCE = 8


@torch.no_grad()
def record_domains(model: LanguageModel, group: ferry.Group, corpus: Corpus, num_windows: int,
                   folder: Path) -> None:
    """One trace per domain, FOLDER/DOMAIN, of validation windows, each a sequence of the trace.

    Rank 0 has all the tokens and writes; the other ranks lend their experts.
    Requires: the same call on all ranks
    """
    model.eval()
    context = model.config.context
    for domain in corpus.domains:
        windows = torch.from_numpy(corpus.validation(domain, num_windows, context)).long()[:, :-1]
        with record_routing(model, num_experts=model.config.num_experts) as recorder:
            for begin in range(0, num_windows, _WINDOWS_AT_ONCE):
                end = begin + _WINDOWS_AT_ONCE if group.rank == 0 else begin
                recorder.next_batch(sequence_lengths=[context] * len(windows[begin:end]))
                model(windows[begin:end])
        if group.rank == 0:
            recorder.write(folder / domain, model="ferry_lm", phase="prefill", domain=domain,
                           hidden=model.config.hidden,
                           expert_intermediate=model.config.intermediate)
    model.train()
