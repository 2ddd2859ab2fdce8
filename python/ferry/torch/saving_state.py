"""What a checkpoint holds of a model and its optimiser: named tensors that know nothing of ranks.

A dense tensor has its name in the model, a tensor of experts one name for each of them, by its global
id; an optimiser's state stands beside the parameter that it is of:

    model/layers.0.moe.gate.weight      optimizer/exp_avg/layers.0.moe.gate.weight
    model/layers.0.moe.experts/17/w1    optimizer/exp_avg/layers.0.moe.experts/17/w1

(What ranks have not sent yet of their gradients is each rank's own: saving_residuals.py.)

Invariant. A name means the same tensor in every split of the world and for every placement; only
`Snapshot` and `Loading` here know which slice of which parameter it is on this rank. Numbers of a
state, such as `step`, are kept once for each expert, too: experts that come together on a rank must
agree on them.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

import torch
from torch import Tensor, nn

from ferry.torch.layer import MoELayer
from ferry.torch.parallel import expert_parameters
from ferry.torch.saving_files import DTYPES, NAMES

_EXPERT = re.compile(r"(?:model|optimizer/[^/]+|residual/\d+)/(.*)/(\d+)/[^/]+")


def described(name: str) -> str:
    """A tensor for an error text, with its expert."""
    match = _EXPERT.fullmatch(name)
    return f"{name!r}" + (f", of expert {match[2]} of {match[1]!r}" if match else "")


@dataclass(frozen=True)
class Entry:
    """A parameter or buffer: a dense one, or one that has a slice for each expert of this rank.

    key      its name in the model; "layers.0.moe.experts/w1" where it has slices
    experts  the ids of the slices, in order; None = dense
    """

    key: str
    tensor: Tensor
    experts: Optional[Tuple[int, ...]] = None

    def names(self) -> List[str]:
        if self.experts is None:
            return [self.key]
        module, _, own = self.key.rpartition("/")
        return [f"{module}/{expert}/{own}" for expert in self.experts]

    def pieces(self, tensor: Tensor) -> List[Tensor]:
        """The parts of a tensor of this entry's shape, in the order of the names."""
        return [tensor.detach()] if self.experts is None else list(tensor.detach().unbind(0))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without DistributedDataParallel, whose names begin with "module."."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    return model


def _named_tensors(module: nn.Module) -> Iterator[Tuple[str, Tensor]]:
    """Parameters and persistent buffers, each once."""
    seen: Set[int] = set()
    for path, part in module.named_modules():
        own = {**part._parameters, **{name: buffer for name, buffer in part._buffers.items()
                                      if name not in part._non_persistent_buffers_set}}
        for name, tensor in own.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{name}" if path else name, tensor


def _check_slices(key: str, tensor: Tensor, experts: Tuple[int, ...]) -> None:
    if len(set(experts)) < len(experts):
        raise ValueError(f"{key!r} has local_experts {list(experts)}; allowed: each expert once")
    if tensor.dim() < 1 or tensor.shape[0] != len(experts):
        raise ValueError(f"{key!r} is {list(tensor.shape)}; allowed: [{len(experts)}, ...], a slice "
                         "for each of local_experts; fix: stack the experts' tensors")


def model_entries(model: nn.Module) -> List[Entry]:
    """Every parameter and persistent buffer of the model, tied ones once.

    Errors: ValueError (experts of one's own that do not say which tensor is whose)
    """
    slices: Dict[int, Entry] = {}
    for path, module in model.named_modules():
        experts = getattr(module, "local_experts", None)
        if experts is None or not getattr(module, "ferry_experts", False):
            continue
        for own, tensor in _named_tensors(module):
            key = f"{path}/{own}"
            _check_slices(key, tensor, tuple(experts))
            slices.setdefault(id(tensor), Entry(key, tensor, tuple(int(e) for e in experts)))
    unknown = {id(parameter) for parameter in expert_parameters(model)} - slices.keys()
    entries = []
    for name, tensor in _named_tensors(model):
        if id(tensor) in unknown:
            raise ValueError(f"{name!r} belongs to experts, and it is not known to which; allowed: "
                             "parameters [number of local experts, ...] of a module with the "
                             "attribute local_experts, the ids in that order; fix: give it one, as "
                             "GroupedExperts has")
        entries.append(slices.get(id(tensor), Entry(name, tensor)))
    return entries


def expert_totals(model: nn.Module) -> Dict[str, int]:
    """How many experts the layers have on all ranks, by the name of the module that holds them."""
    return {f"{path}.experts" if path else "experts": module.num_experts
            for path, module in model.named_modules() if isinstance(module, MoELayer)}


def _plain(value: Any, what: str) -> Any:
    """A hyperparameter as JSON has it: numbers for tensors of one element, lists for tuples."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(one, what) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{what} of the optimiser is a {type(value).__name__}; allowed: numbers, "
                     "strings, None, and tuples of them")


def _like(value: Any, current: Any) -> Any:
    """A hyperparameter from JSON as the optimiser has it."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    if isinstance(current, (list, tuple)) and isinstance(value, list):
        return type(current)(_like(one, now) for one, now in zip(value, current))
    return value


def _options(group: Mapping[str, Any]) -> Dict[str, Any]:
    return {name: _plain(value, name) for name, value in group.items() if name != "params"}


def _optimizer_entries(optimizer: torch.optim.Optimizer, entries: List[Entry]) -> List[List[Entry]]:
    """The entries of each parameter group."""
    known = {id(entry.tensor): entry for entry in entries}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError(f"a parameter {list(parameter.shape)} of the optimiser's group "
                                 f"{number} is not in the model; allowed: parameters of the model; "
                                 "fix: give the model that the optimiser was made for")
    return [[known[id(parameter)] for parameter in group["params"]]
            for group in optimizer.param_groups]


def _name_of(dtype: torch.dtype, what: str) -> str:
    if dtype not in NAMES:
        raise ValueError(f"{what} is {dtype}; allowed: {', '.join(str(one) for one in NAMES)}")
    return NAMES[dtype]


@dataclass
class Snapshot:
    """What this rank holds, under names that are the same in every layout.

    tensors    by name: the memory itself
    values     by name: {"value": ...} of numbers; with "dtype" where it was a tensor
    optimizer  its type, and of each parameter group the keys of its parameters and its options
    """

    experts: Dict[str, int]
    tensors: Dict[str, Tensor] = field(default_factory=dict)
    values: Dict[str, Any] = field(default_factory=dict)
    optimizer: Optional[Dict[str, Any]] = None

    def add(self, prefix: str, entry: Entry, tensor: Tensor) -> None:
        for name, piece in zip(entry.names(), entry.pieces(tensor)):
            _name_of(piece.dtype, f"{prefix}/{name}")
            self.tensors[f"{prefix}/{name}"] = piece

    def add_state(self, key: str, entry: Entry, value: Any) -> None:
        prefix = f"optimizer/{key}"
        if not isinstance(key, str) or "/" in key:
            raise ValueError(f"the optimiser has a state {key!r} of {entry.key!r}; allowed: names "
                             "without '/'")
        # A number may stand on the CPU beside a parameter on a GPU; `step` always is one.
        is_number = not isinstance(value, Tensor) or value.dim() == 0 and (
            entry.tensor.dim() > 0 or key == "step")
        if not is_number:
            if entry.experts is not None and value.shape != entry.tensor.shape:
                raise ValueError(f"{prefix}/{entry.key} is {list(value.shape)}; allowed: one number, "
                                 f"or {list(entry.tensor.shape)} as the parameter, so that it can be "
                                 "cut by experts")
            self.add(prefix, entry, value)
            return
        plain = {"value": _plain(value, f"the state {key!r}")}
        if isinstance(value, Tensor):
            plain["dtype"] = _name_of(value.dtype, f"{prefix}/{entry.key}")
        self.values.update({f"{prefix}/{name}": plain for name in entry.names()})


def collect(model: nn.Module, optimizer: Optional[torch.optim.Optimizer]) -> Snapshot:
    """All that a checkpoint takes from this rank.

    Errors: ValueError (what cannot be named or written)
    """
    entries = model_entries(model)
    result = Snapshot(expert_totals(model))
    for entry in entries:
        result.add("model", entry, entry.tensor)
        if entry.experts:
            module = entry.key.rpartition("/")[0]
            result.experts.setdefault(module, 0)
            result.experts[module] = max(result.experts[module], max(entry.experts) + 1)
    if optimizer is None:
        return result
    groups = _optimizer_entries(optimizer, entries)
    result.optimizer = {"type": type(optimizer).__name__, "groups": [
        {"parameters": [entry.key for entry in members], "options": _options(group)}
        for members, group in zip(groups, optimizer.param_groups)]}
    for entry in (entry for members in groups for entry in members):
        for key, value in optimizer.state.get(entry.tensor, {}).items():
            result.add_state(key, entry, value)
    return result


class Loading:
    """Memory for what this rank takes from a checkpoint; model and optimiser change in `apply` alone.

    targets  by name: what is to be read, slices of tensors on the CPU
    used     all names that this rank takes, those of numbers included
    Errors:  ValueError that names the tensor, parameter or option that does not fit
    """

    def __init__(self, index: Mapping[str, Any], model: nn.Module,
                 optimizer: Optional[torch.optim.Optimizer]) -> None:
        self.targets: Dict[str, Tensor] = {}
        self.used: Set[str] = set()
        self._index, self._optimizer = index, optimizer
        self._model: List[Tuple[Tensor, Tensor]] = []
        self._state: Dict[Tensor, Dict[str, Any]] = {}
        self._state_tensors: List[Tuple[Tensor, str, Tensor]] = []
        self._check_totals(expert_totals(model))
        entries = model_entries(model)
        for entry in entries:
            self._model.append((entry.tensor, self._take_model(entry)))
        if optimizer is not None:
            self._take_optimizer(_optimizer_entries(optimizer, entries))

    def apply(self) -> None:
        """Copies all of it in. Cannot fail for what the checkpoint holds."""
        with torch.no_grad():
            for tensor, loaded in self._model:
                tensor.copy_(loaded)
        if self._optimizer is None:
            return
        for parameter, key, loaded in self._state_tensors:
            self._state[parameter][key] = loaded.to(parameter.device)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, saved in zip(self._optimizer.param_groups, self._index["optimizer"]["groups"]):
            for name, value in saved["options"].items():
                group[name] = _like(value, group.get(name))
        # As load_state_dict does: PyTorch brings the state of an older version up to date here.
        self._optimizer.__setstate__({"state": self._optimizer.state,
                                      "param_groups": self._optimizer.param_groups})

    def _check_totals(self, totals: Dict[str, int]) -> None:
        for module, number in totals.items():
            saved = self._index["experts"].get(module, number)
            if saved != number:
                raise ValueError(f"{module!r} has {number} experts, in the checkpoint {saved}; "
                                 f"allowed: the same; fix: give num_experts = {saved} to the layer")

    def _stage(self, names: List[str], shape: List[int], dtype: torch.dtype, sliced: bool) -> Tensor:
        """Memory for one tensor, dense or with a slice for each name."""
        stage = torch.empty([len(names), *shape] if sliced else shape, dtype=dtype)
        for name, piece in zip(names, stage.unbind(0) if sliced else [stage]):
            self.targets[name] = piece
        self.used.update(names)
        return stage

    def _take_model(self, entry: Entry) -> Tensor:
        sliced = entry.experts is not None
        names = [f"model/{name}" for name in entry.names()]
        shape = list(entry.tensor.shape[1:] if sliced else entry.tensor.shape)
        for name in names:
            saved = self._index["tensors"].get(name)
            if saved is None:
                raise ValueError(f"the checkpoint lacks {described(name)}; fix: build the model that "
                                 "was saved")
            if saved["shape"] != shape or DTYPES.get(saved["dtype"]) != entry.tensor.dtype:
                raise ValueError(f"{described(name)} is {saved['dtype']} {saved['shape']} in the "
                                 f"checkpoint, in the model {entry.tensor.dtype} {shape}; allowed: "
                                 "the same; fix: build the model that was saved")
        return self._stage(names, shape, entry.tensor.dtype, sliced)

    def _take_optimizer(self, groups: List[List[Entry]]) -> None:
        saved = self._index["optimizer"]
        kind = type(self._optimizer).__name__
        if saved is None or saved["type"] != kind or len(saved["groups"]) != len(groups):
            what = "none" if saved is None else f"{saved['type']}, {len(saved['groups'])} groups"
            raise ValueError(f"the optimiser is {kind} with {len(groups)} parameter groups, in the "
                             f"checkpoint {what}; allowed: the same; fix: build that one, or load "
                             "the model alone, without an optimiser")
        states: Dict[str, Dict[str, str]] = {}  # by parameter: key of the state -> full name
        for full in (*self._index["tensors"], *self._index["values"]):
            if full.startswith("optimizer/"):
                _, key, name = full.split("/", 2)
                states.setdefault(name, {})[key] = full
        for number, (members, group) in enumerate(zip(groups, saved["groups"])):
            for entry in members:
                if entry.key not in group["parameters"]:
                    raise ValueError(f"{entry.key!r} is in group {number} of the optimiser, and not "
                                     "so in the checkpoint; allowed: the same groups; fix: make them "
                                     "as they were saved")
                self._take_state(entry, [states.get(name, {}) for name in entry.names()],
                                 {**self._optimizer.param_groups[number], **group["options"]})

    def _take_state(self, entry: Entry, states: List[Dict[str, str]],
                    options: Mapping[str, Any]) -> None:
        """The state of one parameter; states[i] is that of its slice i."""
        for name, state in zip(entry.names(), states):
            if state.keys() != states[0].keys():
                raise ValueError(f"{name!r} has the optimiser's state {sorted(state)}, "
                                 f"{entry.names()[0]!r} has {sorted(states[0])}; allowed on one "
                                 "rank: the same; fix: load with the placement that was saved")
        for key in states[0] if states else ():
            fulls, own = [state[key] for state in states], self._state.setdefault(entry.tensor, {})
            if all(full in self._index["values"] for full in fulls):
                own[key] = self._number(fulls, options)
            else:
                self._state_tensors.append((entry.tensor, key, self._tensor(fulls, entry)))

    def _tensor(self, fulls: List[str], entry: Entry) -> Tensor:
        sliced, saved = entry.experts is not None, self._index["tensors"]
        first = next(saved[full] for full in fulls if full in saved)
        for full in fulls:
            one = saved.get(full, {"dtype": "a number", "shape": []})
            if one["dtype"] != first["dtype"] or (
                    sliced and one["shape"] != list(entry.tensor.shape[1:])):
                raise ValueError(f"{described(full)} is {one['dtype']} {one['shape']} in the "
                                 f"checkpoint; allowed: {first['dtype']} "
                                 f"{list(entry.tensor.shape[1:])}")
        return self._stage(fulls, first["shape"], DTYPES[first["dtype"]], sliced)

    def _number(self, fulls: List[str], options: Mapping[str, Any]) -> Any:
        values = self._index["values"]
        first = values[fulls[0]]
        for full in fulls:
            if json.dumps(values[full]) != json.dumps(first):
                raise ValueError(f"{described(full)} is {values[full]['value']}, "
                                 f"{fulls[0]!r} is {first['value']}; allowed on one rank: the same; "
                                 "fix: load with the placement that was saved")
        self.used.update(fulls)
        if "dtype" not in first:
            return first["value"]
        on_device = options.get("capturable") or options.get("fused")
        device = options["params"][0].device if on_device else "cpu"
        return torch.tensor(first["value"], dtype=DTYPES[first["dtype"]], device=device)
