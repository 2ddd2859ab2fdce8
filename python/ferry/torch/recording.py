"""Records what a model's routers choose, as a routing trace that the `ferry` command reads.

`record_routing` hooks into any PyTorch model; `write_trace` takes arrays from anywhere else.
docs/trace-format.md describes the form byte by byte, with recipes for other systems.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Type, Union

import numpy
import torch
from torch import Tensor, nn

from ferry.torch.gates import GateOutput, TopkGate, topk_from_logits

Routing = Tuple[Tensor, Optional[Tensor]]
Extract = Callable[[nn.Module, tuple, object], Routing]
Select = Union[str, Type[nn.Module], Callable[[str, nn.Module], bool]]

#: What the command accepts (tools/common/trace.cpp).
_MAX_TOPK = 64
_MAX_EXPERTS = 1 << 20


def _refuse(what: str, allowed: str, fix: str) -> None:
    raise ValueError(f"routing trace: {what}; allowed: {allowed}; fix: {fix}")


def _checked_idx(topk_idx, num_experts: int) -> numpy.ndarray:
    idx = numpy.asarray(topk_idx)
    if idx.dtype.kind not in "iu" or idx.ndim != 3 or idx.shape[1] < 1 or not (
            1 <= idx.shape[2] <= _MAX_TOPK):
        _refuse(f"topk_idx is {idx.dtype} {list(idx.shape)}",
                f"integers [num_tokens, num_layers, num_topk] with 1..{_MAX_TOPK} top-k",
                "stack the layers' choices along dimension 1")
    if not 1 <= num_experts <= _MAX_EXPERTS:
        _refuse(f"num_experts = {num_experts}", f"1..{_MAX_EXPERTS}", "give the experts of one layer")
    wrong = numpy.argwhere((idx < -1) | (idx >= num_experts)) if idx.dtype.kind == "i" else (
        numpy.argwhere(idx >= num_experts))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        _refuse(f"topk_idx{list(at)} = {int(idx[at])} is not an expert",
                f"-1 (none) or 0..{num_experts - 1}, because num_experts = {num_experts}",
                "give the number of experts of one layer")
    narrow = "|i1" if num_experts <= 1 << 7 else "<i2" if num_experts <= 1 << 15 else "<i4"
    return idx.astype(narrow, order="C")


def _checked_weights(topk_weights, shape) -> numpy.ndarray:
    weights = numpy.asarray(topk_weights, dtype="<f4", order="C")
    if weights.shape != shape:
        _refuse(f"topk_weights has shape {list(weights.shape)}", f"{list(shape)}, as topk_idx",
                "leave them out for weight 1/num_topk each")
    if not numpy.isfinite(weights).all():
        at = [int(i) for i in numpy.argwhere(~numpy.isfinite(weights))[0]]
        _refuse(f"topk_weights{at} is not finite", "finite numbers", "correct the router's output")
    return weights


def write_trace(output: Union[str, Path], topk_idx, num_experts: int, topk_weights=None, *,
                model: Optional[str] = None, hidden: Optional[int] = None,
                sequence_lengths: Optional[Sequence[int]] = None, **more: object) -> Path:
    """Writes a routing trace: topk_idx.npy, topk_weights.npy, meta.json.

    Shapes:   topk_idx integers [num_tokens, num_layers, num_topk], -1 = none; topk_weights of the
              same shape, or None: every weight is then 1/num_topk
    sequence_lengths  tokens of each sequence, in order, adding up to num_tokens; None = one sequence
    more      further keys of meta.json, such as phase
    Returns:  the directory, made if need be. A weights file of an earlier trace there goes
    Errors:   ValueError that names what is wrong, what is allowed and the fix; OSError
    """
    idx = _checked_idx(topk_idx, num_experts)
    weights = None if topk_weights is None else _checked_weights(topk_weights, idx.shape)
    meta: Dict[str, object] = {"num_experts": int(num_experts)}
    if model is not None:
        meta["model"] = model
    if hidden is not None:
        meta["hidden"] = int(hidden)
    if sequence_lengths is not None:
        lengths = [int(length) for length in sequence_lengths]
        if any(length < 0 for length in lengths) or sum(lengths) != idx.shape[0]:
            _refuse(f"sequence_lengths add up to {sum(lengths)}", f"{idx.shape[0]}, the tokens",
                    "give the length of every sequence, or None for one sequence")
        meta["sequence_lengths"] = lengths
    directory = Path(output)
    directory.mkdir(parents=True, exist_ok=True)
    numpy.save(directory / "topk_idx.npy", idx)
    if weights is not None:
        numpy.save(directory / "topk_weights.npy", weights)
    else:
        (directory / "topk_weights.npy").unlink(missing_ok=True)
    (directory / "meta.json").write_text(json.dumps({**more, **meta}, indent=1) + "\n")
    return directory


def _tensors_in(output: object) -> List[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in _tensors_in(part)]
    return []


def _own_choice(output: object) -> Optional[Routing]:
    """A GateOutput, or anything with the fields topk_idx and topk_weights."""
    get = output.get if isinstance(output, dict) else lambda name: getattr(output, name, None)
    idx = get("topk_idx") if output is not None and not isinstance(output, (Tensor, tuple)) else None
    return None if idx is None else (idx, get("topk_weights"))


class _Reader:
    """Finds ids and weights in what a router returned."""

    def __init__(self, num_topk: Optional[int], score: str, renormalise: bool) -> None:
        self.num_topk, self.score, self.renormalise = num_topk, score, renormalise

    def __call__(self, module: nn.Module, inputs: tuple, output: object) -> Routing:
        own = _own_choice(output)
        if own is not None:
            return own
        tensors = _tensors_in(output)
        ids = [t for t in tensors if not t.is_floating_point() and t.dtype != torch.bool
               and t.dim() >= 1]
        floats = [t for t in tensors if t.is_floating_point() and t.dim() >= 1]
        if ids:
            return ids[0], self._weights(ids[0], floats)
        k = self.num_topk or getattr(module, "top_k", None) or getattr(module, "num_topk", None)
        if floats and k:
            logits = floats[0].reshape(-1, floats[0].shape[-1])
            return topk_from_logits(logits, int(k), score=self.score, renormalise=self.renormalise)
        raise ValueError(
            f"record_routing: {type(module).__name__} returned neither ids nor, with a known k, "
            "logits; allowed: an object with topk_idx; a tuple with ids [.., k] and weights [.., k]; "
            "logits [.., num_experts] and num_topk=; fix: give num_topk=, or extract=, a function of "
            "(module, inputs, output) that returns (topk_idx, topk_weights or None)")

    def _weights(self, idx: Tensor, floats: Iterable[Tensor]) -> Optional[Tensor]:
        floats = list(floats)
        for values in floats:
            if values.shape == idx.shape:
                return values
        full = [t for t in floats if t.dim() == idx.dim() and t.shape[:-1] == idx.shape[:-1]]
        at = idx.clamp(min=0).to(torch.int64)
        for values in full:  # weights of all experts, 0 for those that were not chosen
            if not values.scatter(-1, at, 0).any():
                return values.gather(-1, at)
        if not full:
            return None
        logits = full[0].detach().float()  # no weights, but logits to take them from
        scores = torch.softmax(logits, -1) if self.score == "softmax" else torch.sigmoid(logits)
        weights = scores.gather(-1, at)
        return weights / weights.sum(-1, keepdim=True) if self.renormalise else weights


@dataclass
class _Layer:
    """What one router chose: arrays of the forwards that ended, and of the one that runs."""

    ids: List[numpy.ndarray] = field(default_factory=list)
    weights: List[Optional[numpy.ndarray]] = field(default_factory=list)
    running: List[Routing] = field(default_factory=list)
    num_experts: int = 0
    hidden: int = 0
    batch: Optional[Tuple[int, int]] = None  # (sequences, tokens each) that its last input told


class RoutingRecorder:
    """What `record_routing` gives: the layers so far, and `write`.

    layer_names   names of the routers in the order in which the model called them first
    """

    def __init__(self, extract: Extract, num_experts: Optional[int]) -> None:
        self._extract, self._num_experts = extract, num_experts
        self._layers: Dict[str, _Layer] = {}
        self._lengths: List[int] = []
        self._mask: Optional[Tensor] = None
        self._sequences: Optional[Sequence[int]] = None
        self._active = False

    @property
    def layer_names(self) -> List[str]:
        return list(self._layers)

    def next_batch(self, mask: Optional[Tensor] = None,
                   sequence_lengths: Optional[Sequence[int]] = None) -> None:
        """Describes the tokens of the next forward of the model.

        mask              bool or 0/1 [batch, length]: tokens with 0 are padding and are left out
        sequence_lengths  where routers see flat tokens: the length of each sequence. Without either,
                          a router's [batch, length, hidden] tells, or the forward is one sequence
        """
        self._mask, self._sequences = mask, sequence_lengths

    # Called by the hooks.
    def _begin(self) -> None:
        self._active = True
        for layer in self._layers.values():
            layer.running = []  # of a forward that raised

    def _record(self, name: str, module: nn.Module, inputs: tuple, output: object) -> None:
        if not self._active or (isinstance(output, GateOutput) and output.replayed):
            return  # a layer that a checkpoint computes again, in backward
        idx, weights = self._extract(module, inputs, output)
        layer = self._layers.setdefault(name, _Layer())
        num_topk = idx.shape[-1]
        layer.running.append((
            idx.detach().reshape(-1, num_topk).cpu(),
            None if weights is None else weights.detach().float().reshape(-1, num_topk).cpu()))
        layer.num_experts = max(layer.num_experts, _experts_of(module, output))
        x = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
        layer.batch = (x.shape[0], x.shape[1]) if x is not None and x.dim() == 3 else None
        if x is not None and x.dim() > 1:
            layer.hidden = x.shape[-1]

    def _end(self) -> None:
        self._active = False
        keep = None if self._mask is None else self._mask.detach().reshape(-1).cpu().bool()
        for place, (name, layer) in enumerate(self._layers.items()):
            ids = torch.cat([part for part, _ in layer.running]) if layer.running else None
            if ids is None:
                continue
            known = all(part is not None for _, part in layer.running)
            weights = torch.cat([part for _, part in layer.running]) if known else None
            if keep is not None and len(keep) != len(ids):
                _refuse(f"the mask has {len(keep)} tokens, {name} {len(ids)}", "as many",
                        "give next_batch the mask of the forward that follows")
            if place == 0:
                self._lengths += self._batch_lengths(layer, len(ids))
            chosen = slice(None) if keep is None else keep
            layer.ids.append(ids[chosen].numpy())
            layer.weights.append(None if weights is None else weights[chosen].numpy())
            layer.running = []
        self._mask, self._sequences = None, None

    def _batch_lengths(self, layer: _Layer, num_tokens: int) -> List[int]:
        if self._sequences is not None:
            return [int(length) for length in self._sequences]
        if self._mask is not None:
            rows = self._mask.detach().to(torch.int64)
            return [int(n) for n in (rows.sum(1) if rows.dim() == 2 else rows.sum().reshape(1))]
        if layer.batch is not None and layer.batch[0] * layer.batch[1] == num_tokens:
            return [layer.batch[1]] * layer.batch[0]
        return [num_tokens]

    def arrays(self) -> Tuple[numpy.ndarray, Optional[numpy.ndarray]]:
        """topk_idx [num_tokens, num_layers, num_topk] and weights, or None where a router gave none.
        Layers with a smaller top-k are filled up with -1.

        Errors: ValueError where nothing was recorded, or layers saw different numbers of tokens
        """
        if not any(layer.ids for layer in self._layers.values()):
            _refuse("no router ran", "a forward of the model inside record_routing",
                    "run one, or check select=")
        ids = {name: numpy.concatenate(layer.ids) for name, layer in self._layers.items()
               if layer.ids}
        counts = {name: len(values) for name, values in ids.items()}
        if len(set(counts.values())) > 1:
            _refuse(f"layers saw different numbers of tokens: {counts}", "the same in every layer",
                    "select routers that see all tokens")
        widest = max(values.shape[1] for values in ids.values())
        topk_idx = numpy.stack([_widened(v, widest, -1) for v in ids.values()], axis=1)
        layers = [self._layers[name] for name in ids]
        if any(part is None for layer in layers for part in layer.weights):
            return topk_idx, None
        weights = [numpy.concatenate(layer.weights) for layer in layers]
        return topk_idx, numpy.stack([_widened(v, widest, 0) for v in weights], axis=1)

    def write(self, output: Union[str, Path], **meta: object) -> Path:
        """Writes the trace so far; `meta` as in write_trace. Errors: as arrays and write_trace."""
        topk_idx, weights = self.arrays()
        layers = list(self._layers.values())
        num_experts = self._num_experts or max(layer.num_experts for layer in layers)
        if num_experts == 0:
            _refuse("the number of experts is unknown", "a router with num_experts, or with logits "
                    "or scores of all experts in its output", "give num_experts=")
        hidden = {layer.hidden for layer in layers}
        if len(hidden) == 1 and max(hidden) > 0:
            meta.setdefault("hidden", max(hidden))
        meta.setdefault("layers", self.layer_names)
        return write_trace(output, topk_idx, num_experts, weights,
                           sequence_lengths=self._lengths, **meta)


def _widened(values: numpy.ndarray, width: int, fill) -> numpy.ndarray:
    extra = numpy.full((len(values), width - values.shape[1]), fill, dtype=values.dtype)
    return numpy.concatenate([values, extra], axis=1)


def _experts_of(module: nn.Module, output: object) -> int:
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    floats = [t.shape[-1] for t in _tensors_in(output) if t.is_floating_point() and t.dim() >= 2]
    ids = [t.shape[-1] for t in _tensors_in(output) if not t.is_floating_point() and t.dim() >= 1]
    return max(floats) if floats and (not ids or max(floats) > max(ids)) else 0


def _selects(select: Optional[Union[Select, Sequence[Select]]], name: str, module: nn.Module) -> bool:
    if select is None:
        return isinstance(module, TopkGate)
    if isinstance(select, (list, tuple)):
        return any(_selects(one, name, module) for one in select)
    if isinstance(select, str):
        return name == select or name.endswith("." + select)
    if isinstance(select, type):
        return isinstance(module, select)
    return bool(select(name, module))


class _Recording:
    """The context manager of record_routing."""

    def __init__(self, model, select, output, recorder, meta) -> None:
        self._model, self._output, self._recorder, self._meta = model, output, recorder, meta
        self._routers = [(name, module) for name, module in model.named_modules()
                         if _selects(select, name, module)]
        if not self._routers:
            kinds = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(f"record_routing: no module is selected by {select!r}; allowed: a name "
                             "or its end, a type, a function of (name, module), or a list of these; "
                             f"the model has the types {', '.join(kinds)}")
        self._hooks: list = []

    def __enter__(self) -> RoutingRecorder:
        recorder = self._recorder
        self._hooks.append(self._model.register_forward_pre_hook(lambda m, i: recorder._begin()))
        for name, module in self._routers:
            def hook(m, inputs, output, name=name):
                recorder._record(name, m, inputs, output)
            self._hooks.append(module.register_forward_hook(hook))
        self._hooks.append(self._model.register_forward_hook(lambda m, i, o: recorder._end()))
        return recorder

    def __exit__(self, kind, error, traceback) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None and self._output is not None:
            self._recorder.write(self._output, **self._meta)


def record_routing(model: nn.Module, /, select: Optional[Union[Select, Sequence[Select]]] = None,
                   output: Optional[Union[str, Path]] = None, *,
                   extract: Optional[Extract] = None, num_experts: Optional[int] = None,
                   num_topk: Optional[int] = None, score: str = "softmax",
                   renormalise: bool = True, **meta: object) -> _Recording:
    """A context in which every forward of `model` adds its tokens to a routing trace.

        with ferry.torch.record_routing(model, select="mlp.gate", output="trace", num_topk=8):
            model(tokens)

    select       which modules are routers: the end of a name, a type, a function of (name, module), a
                 list of these; None = Ferry's gates
    output       where to write the trace at the end; None = call `write` of what `with` gives
    extract      a function of (module, inputs, output) -> (topk_idx, topk_weights or None), where the
                 output of the router is none of: an object or dict with topk_idx and topk_weights; ids
                 and weights, in a tuple, in any order; logits of all experts
    num_topk, score, renormalise   how to read logits: "softmax" or "sigmoid"
    num_experts  where neither the router nor its output tells
    meta         further keys of meta.json, such as model="..."
    Ensures:     forwards outside of the context and layers that a checkpoint computes again leave no
                 mark; nothing is written when the body raised
    Errors:      ValueError that says what was found and how to say it instead
    """
    reader = extract or _Reader(num_topk, score, renormalise)
    return _Recording(model, select, output, RoutingRecorder(reader, num_experts), meta)
