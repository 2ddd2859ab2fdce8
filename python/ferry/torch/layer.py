"""A Mixture-of-Experts layer over an expert-parallel group: gate, exchange, experts, shared experts.

How a call goes, with `overlap` chunks c of tokens:

    gate 0, plan 0, dispatch 0 ─┐ on the wire: shared experts; gate 1, plan 1
                 rows 0 <───────┘ dispatch 1 leaves; experts 0; combine 0 leaves
                                  gate 2, plan 2; rows 1; dispatch 2 leaves; experts 1; ...
    out <─ all combines

Backward is pipelined the same way (exchange_call.py), and uses the plans of forward.
"""

import copy
import inspect
from dataclasses import dataclass, fields
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from ferry._ferry import Placement
from ferry.torch import checkpoints
from ferry.torch.dispatcher import Dispatcher
from ferry.torch.exchange_call import ExchangeCall
from ferry.torch.experts import GroupedExperts, SharedExperts, scale_rows
from ferry.torch.gates import GateOutput, SigmoidGate, SoftmaxGate, TopkGate
from ferry.torch.parallel import mark_experts
from ferry.torch.precision_warnings import PrecisionWarnings
from ferry.torch.seeds import seed_of

_GATES = {"softmax": SoftmaxGate, "sigmoid": SigmoidGate}
_MAX_OVERLAP = 8


@dataclass
class RoutingStatistics:
    """Of a layer's last forward on this rank.

    counts    int64 [E]: tokens of this rank that chose each expert, before drops
    dropped   int64 [E]: those that a capacity left out
    aux_loss  float32 scalar, without gradient
    """

    counts: Tensor
    dropped: Tensor
    aux_loss: Tensor


class _AttachLoss(torch.autograd.Function):
    """The output as it is; backward gives the auxiliary loss its gradient."""

    @staticmethod
    def forward(ctx, out, loss, scale):
        ctx.scale, ctx.loss_meta = scale, (loss.dtype, loss.device)
        return out.data  # not a view, which the caller could not change in place; nobody saved `out`

    @staticmethod
    def backward(ctx, grad):
        dtype, device = ctx.loss_meta
        return grad, torch.as_tensor(ctx.scale, dtype=dtype, device=device), None


def _layers_so_far(group: Any) -> int:
    """How many layers were made on the group before: the same on every rank and for every split of
    the world into groups, because all ranks make the same layers in the same order."""
    number = getattr(group, "_torch_layers", 0)
    group._torch_layers = number + 1
    return number


class _GateCaller:
    """Calls a gate with what it can take, and does the rest itself."""

    def __init__(self, gate: nn.Module) -> None:
        parameters = inspect.signature(gate.forward).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._gate = gate
        self._takes_mask = takes_all or "mask" in parameters
        self._takes_replay = takes_all or "replay" in parameters

    def __call__(self, x: Tensor, mask: Optional[Tensor], replay: Optional[GateOutput]) -> GateOutput:
        result = self._call(x, mask, replay)
        with torch.no_grad():
            finite = torch.isfinite(result.topk_weights).all(-1)
        if not bool(finite.all()):  # of a gate of one's own
            bad = ~finite
            self._clear(result, bad)
            result.not_finite = bad if result.not_finite is None else result.not_finite | bad
        if replay is not None and not torch.equal(result.topk_idx, replay.topk_idx):
            raise ValueError(f"MoELayer: {type(self._gate).__name__} chose other experts when a "
                             "checkpoint computed it again; allowed: the same choice; fix: let its "
                             "forward take replay=, the GateOutput of the first time")
        return result

    def _call(self, x: Tensor, mask: Optional[Tensor], replay: Optional[GateOutput]) -> GateOutput:
        options = {}
        if self._takes_mask and mask is not None:
            options["mask"] = mask
        if self._takes_replay and replay is not None:
            options["replay"] = replay
        result = self._gate(x, **options)
        self._check(result, x.shape[0])
        if isinstance(result, GateOutput):
            result = copy.copy(result)  # its fields are set below
        else:
            result = GateOutput(**{field.name: getattr(result, field.name, field.default)
                                   for field in fields(GateOutput)})
        if mask is not None and not self._takes_mask:
            self._clear(result, ~mask)
        return result

    @staticmethod
    def _clear(result: GateOutput, tokens: Tensor) -> None:
        """These tokens go to no expert."""
        tokens = tokens.unsqueeze(-1)
        result.topk_idx = result.topk_idx.masked_fill(tokens, -1)
        result.topk_weights = result.topk_weights.masked_fill(tokens, 0.0)

    def _check(self, result: GateOutput, num_tokens: int) -> None:
        idx, weights = getattr(result, "topk_idx", None), getattr(result, "topk_weights", None)
        if idx is None or weights is None or idx.dim() != 2 or idx.shape[0] != num_tokens or (
                idx.shape != weights.shape or weights.dtype != torch.float32):
            raise ValueError(f"MoELayer: {type(self._gate).__name__} returned no choice for "
                             f"{num_tokens} tokens; allowed: a ferry.torch.GateOutput with topk_idx "
                             "int [T, k] and topk_weights float32 [T, k]; fix: return that")


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer: out[t] = sum_j w[t,j] * expert_j(x[t]), plus shared experts.

    hidden, intermediate   widths of a token and of an expert
    num_experts, num_topk  experts of all ranks, and how many each token goes to
    num_shared_experts     experts that every token goes to, on its own rank, while it is on the wire
    group        a ferry Group: who shares the experts; the world or any sub-group (`split_world`)
    gate         "softmax", "sigmoid", or a module that returns a GateOutput (see gates.py)
    placement    a ferry.Placement; None = contiguous blocks
    overlap      1..8: chunks that are pipelined, the same number on every rank. A gate's capacity and
                 balance loss are then those of each chunk
    dtype        of experts and exchanged rows; None = PyTorch's default. The gate computes in FP32
    params_dtype   of the experts' parameters; None = dtype. torch.float32 with a half-precision dtype:
                 rows are narrow, and the optimiser's steps are not rounded away
    strategy, weights   of ferry.Exchange; weights "at_combine" or "at_expert"
    experts      a module of one's own, called with (rows, expert_counts) -> y, instead of SwiGLU; with
                 row_alignment also with expert_offsets=
    seed         of the first weights; None = the number of the layer on its group, so layers on
                 different groups may start alike. Each expert's weights depend on seed and its id
                 alone, so every split of the world starts alike
    plan_and_dispatch   for small batches, such as decoding: a chunk's rows leave with its metadata,
                 which saves a message's time. The same on every rank; may be set at any time
    options      further options of ferry.Exchange, such as wire_combine="f32"
    Requires:    all ranks of the group make the same layers, call them and run backward in the same
                 order; the layer is used by one thread
    aux_loss_scale   what the gradient of the gate's auxiliary loss is multiplied with. That loss is
                 attached to the output: backward counts it, also under checkpoints, without being
                 told; its value is in `statistics`. With a loss scaler or micro-batches:
                     `set_aux_loss_scale`
    Warns:       ferry.PrecisionWarning, once per layer: a gate in half precision, a quantised combine,
                 gradients too small for f16 (docs/precision.md)
    Errors:      ValueError (sizes, overlap, weights), and those of ferry.Exchange
    """

    def __init__(self, hidden: int, intermediate: int, num_experts: int, num_topk: int,
                 num_shared_experts: int = 0, *, group: Any,
                 gate: Union[str, nn.Module] = "softmax", placement: Optional[Any] = None,
                 overlap: int = 1, dtype: Optional[torch.dtype] = None,
                 strategy: str = "node_dedup", weights: str = "at_combine",
                 experts: Optional[nn.Module] = None, seed: Optional[int] = None,
                 params_dtype: Optional[torch.dtype] = None, plan_and_dispatch: bool = False,
                 **options: Any) -> None:
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self.params_dtype = dtype if params_dtype is None else params_dtype
        if self.params_dtype not in (dtype, torch.float32):
            raise ValueError(f"MoELayer: params_dtype = {params_dtype}; allowed: {dtype}, as dtype, "
                             f"or {torch.float32}")
        if not 1 <= overlap <= _MAX_OVERLAP:
            raise ValueError(f"MoELayer: overlap = {overlap}; allowed: 1..{_MAX_OVERLAP}")
        if weights not in ("at_combine", "at_expert"):
            raise ValueError(f"MoELayer: weights = {weights!r}; allowed: 'at_combine', 'at_expert'")
        if isinstance(gate, str) and gate not in _GATES:
            raise ValueError(f"MoELayer: gate = {gate!r}; allowed: 'softmax', 'sigmoid', a module")
        self.hidden, self.num_experts, self.num_topk = hidden, num_experts, num_topk
        self.overlap, self.aux_loss_scale = overlap, 1.0
        self.plan_and_dispatch = plan_and_dispatch
        self.statistics: Optional[RoutingStatistics] = None
        seed = seed_of("layer", _layers_so_far(group)) if seed is None else seed
        placement = placement or Placement.contiguous(num_experts, group.size)
        self.dispatcher = Dispatcher(group, placement, hidden, dtype, strategy=strategy,
                                     weights=weights, **options)
        self.precision_warnings = PrecisionWarnings(self.dispatcher.exchange.options, dtype)
        self.local_experts = tuple(expert for expert in range(num_experts)
                                   if placement.rank_of(expert) == group.rank)
        if isinstance(gate, str):
            gate = _GATES[gate](hidden, num_experts, num_topk)
            gate.reset_parameters(seed)
        self.gate = gate
        self.experts = mark_experts(experts) if experts is not None else GroupedExperts(
            hidden, intermediate, self.local_experts, dtype=self.params_dtype, seed=seed)
        self.shared_experts = None if num_shared_experts == 0 else SharedExperts(
            hidden, intermediate * num_shared_experts, dtype=self.params_dtype, seed=seed)

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        """The layer's output for this rank's tokens.

        Shapes: x [..., hidden], any number of tokens, also none; mask bool [...]: False = padding, goes
                to no expert (shared experts see it) -> [..., hidden], the dtype of x
        Ensures: a token with NaN or Inf, or whose logits overflow, goes to no expert and comes out
                as NaN, with a gradient of NaN; other tokens, on all ranks, are what they are without it
        Errors: ValueError (shapes, a model that was cast), raised on this rank only: the others wait
                for it until their deadline; and those of ferry.Exchange, the same on every rank
        """
        self._check_dtypes()
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"MoELayer: x has shape {list(x.shape)}; allowed: [..., {self.hidden}]")
        rows = x.reshape(-1, self.hidden)
        if mask is not None:
            if mask.dtype != torch.bool or mask.numel() != rows.shape[0]:
                raise ValueError(f"MoELayer: mask is {mask.dtype} {list(mask.shape)}; allowed: "
                                 f"torch.bool with {rows.shape[0]} values, True = a real token")
            mask = mask.reshape(-1)
        run = _Run(self, rows, mask)
        out = run.forward()
        if not run.repeated:
            self.statistics = run.statistics()
        out = out.to(x.dtype).view(x.shape)
        if self.precision_warnings.begin_call():
            for gate in run.gates:
                self.precision_warnings.look_at_gate(type(self.gate).__name__, gate)
            self.precision_warnings.look_at_gradient_of(out)
        return out

    def _apply(self, fn, **options):
        """A router is not narrowed to half precision with its model: it stays in FP32."""
        if not isinstance(self.gate, TopkGate):
            return super()._apply(fn, **options)
        weight, grad = self.gate.weight, self.gate.weight.grad
        kept, kept_grad = weight.detach(), None if grad is None else grad.detach()
        super()._apply(fn, **options)
        weight = self.gate.weight
        if torch.finfo(weight.dtype).bits < min(32, torch.finfo(kept.dtype).bits):
            weight.grad = None
            weight.data = kept.to(weight.device)
            weight.grad = None if kept_grad is None else kept_grad.to(weight.device)
        return self

    def _check_dtypes(self) -> None:
        """Rows have the dtype that the exchange was made for; a cast of the model leaves that."""
        for part in (self.experts, self.shared_experts):
            if not isinstance(part, (GroupedExperts, SharedExperts)):
                continue
            if part.w1.dtype != self.params_dtype:
                raise ValueError(
                    f"MoELayer: the experts are {part.w1.dtype}, the layer was made for "
                    f"{self.params_dtype}; allowed: the same; fix: give dtype={part.w1.dtype} "
                    "to MoELayer (float32, bfloat16 or float16), instead of casting it with .to(), "
                    ".bfloat16(), .half() or .double(); its gate stays in FP32")

    def extra_repr(self) -> str:
        return (f"hidden={self.hidden}, num_experts={self.num_experts}, num_topk={self.num_topk}, "
                f"overlap={self.overlap}")


@dataclass
class _Decided:
    """What a call leaves for the time when a checkpoint repeats it: per chunk."""

    gates: List[GateOutput]
    plans: List[Any]


def set_aux_loss_scale(model: nn.Module, scale: Union[float, Tensor]) -> None:
    """Sets `aux_loss_scale` of every MoELayer in the model.

    scale   what the step does to its loss before backward: loss_scale / num_microbatches. So 1/4
            where each of four micro-batches calls `(loss / 4).backward()`; `scaler.get_scale() / 4` where
            `scaler.scale(loss / 4).backward()` is called, set anew each step
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.aux_loss_scale = scale


def _without_graph(output: GateOutput) -> GateOutput:
    """A copy for a replay, of the gate's own kind."""
    kept = copy.copy(output)
    for name, value in vars(output).items():
        if isinstance(value, Tensor):
            setattr(kept, name, value.detach())
    kept.scores = None
    return kept


def chunk_spans(num_tokens: int, num_chunks: int) -> List[Tuple[int, int]]:
    """Chunks whose sizes differ by at most one; some are empty where there are fewer tokens."""
    ends = [num_tokens * (chunk + 1) // num_chunks for chunk in range(num_chunks)]
    return list(zip([0] + ends[:-1], ends))


class _Run:
    """One forward of a layer."""

    def __init__(self, layer: MoELayer, rows: Tensor, mask: Optional[Tensor]) -> None:
        self._layer, self._rows, self._mask = layer, rows, mask
        self._gate = _GateCaller(layer.gate)
        self._tokens = rows.to(layer.dispatcher.dtype)
        self._spans = chunk_spans(rows.shape[0], layer.overlap)
        self._call = ExchangeCall(layer.dispatcher.exchange, self._tokens, self._spans)
        self._decided: Optional[_Decided] = checkpoints.recall(layer)
        self.gates: List[GateOutput] = []

    @property
    def repeated(self) -> bool:
        """True where a checkpoint computes again what was computed before."""
        return self._decided is not None

    def forward(self) -> Tensor:
        call, shared, finish_shared = self._call, self._layer.shared_experts, None
        call.enter()
        self._choose(0)
        self._start_dispatch(0)
        for chunk in range(len(self._spans)):
            if chunk == 0 and shared is not None:
                finish_shared = shared.begin(self._tokens)
                call.poll()
            more = chunk + 1 < len(self._spans)
            if more:
                self._choose(chunk + 1)
                call.poll()
            weights = self.gates[chunk].topk_weights
            rows, row_weights = call.finish_dispatch(chunk, weights)
            if more:
                self._start_dispatch(chunk + 1)
            call.start_combine(chunk, self._experts(chunk, rows, row_weights), weights)
        # Made after the experts' nodes and before the one that starts the way back: so backward does
        # the shared experts while gradients are on the wire.
        extra = finish_shared() if finish_shared is not None else None
        out = call.finish()
        if not self.repeated:
            checkpoints.remember(self._layer, _Decided(
                [_without_graph(gate) for gate in self.gates], list(call.plans)))
        out = self._marked(out if extra is None else out + extra)
        loss = self._aux_loss()
        return out if loss is None else _AttachLoss.apply(out, loss, self._layer.aux_loss_scale)

    def _marked(self, out: Tensor) -> Tensor:
        """NaN for tokens that are not finite, and in the gradient of their x: so the loss shows
        them, and a loss scaler skips the step. No other row is touched."""
        bad = [torch.nonzero(gate.not_finite).squeeze(1) + begin
               for gate, (begin, _) in zip(self.gates, self._spans) if gate.not_finite is not None]
        if not bad:
            return out
        tokens = torch.cat(bad)
        return out.index_copy(0, tokens, self._rows[tokens].to(out.dtype) * float("nan"))

    def _shares(self) -> List[float]:
        """Each chunk's part of the tokens that count in its losses."""
        counts = []
        for gate, (begin, end) in zip(self.gates, self._spans):
            count = end - begin if self._mask is None else int(self._mask[begin:end].sum())
            counts.append(count if gate.not_finite is None else count - int(gate.not_finite.sum()))
        return [count / max(1, sum(counts)) for count in counts]

    def _choose(self, chunk: int) -> None:
        """Gate and plan of a chunk; the plan is only started."""
        begin, end = self._spans[chunk]
        mask = None if self._mask is None else self._mask[begin:end]
        replay = self._decided.gates[chunk] if self._decided is not None else None
        gate = self._gate(self._rows[begin:end], mask, replay)
        self.gates.append(gate)
        if self._decided is not None:
            self._call.plans[chunk] = self._decided.plans[chunk]
        elif self._layer.plan_and_dispatch:
            self._call.start_plan_and_dispatch(chunk, gate.topk_idx, gate.topk_weights)
        else:
            self._call.start_plan(chunk, gate.topk_idx, gate.topk_weights)

    def _start_dispatch(self, chunk: int) -> None:
        if self._call.dispatches[chunk] is None:  # else it left with the metadata
            self._call.start_dispatch(chunk)

    def _experts(self, chunk: int, rows: Tensor, row_weights: Optional[Tensor]) -> Tensor:
        call, experts, plan = self._call, self._layer.experts, self._call.plans[chunk]
        counts = plan.expert_counts
        if not isinstance(experts, GroupedExperts):
            aligned = {} if sum(counts) == plan.num_rows else {"expert_offsets": plan.expert_offsets}
            y = experts(rows, counts, **aligned).to(rows.dtype)  # autocast may have chosen another
        else:
            y = experts(rows, counts, expert_offsets=plan.expert_offsets, poll=call.poll,
                        out=call.output(chunk) if row_weights is None else None,
                        grad_rows_memory=lambda: call.output(chunk))
        return y if row_weights is None else scale_rows(y, row_weights, call.output(chunk))

    def _aux_loss(self) -> Optional[Tensor]:
        """The chunks' losses, each by its share of the tokens."""
        losses = [gate.aux_loss for gate in self.gates]
        if any(loss is None for loss in losses) or not any(loss.requires_grad for loss in losses):
            return None
        return sum(loss * share for loss, share in zip(losses, self._shares()))

    def statistics(self) -> RoutingStatistics:
        """Summed over the chunks; zeros for what a gate of one's own does not tell."""
        none = torch.zeros(self._layer.num_experts, dtype=torch.int64)

        def add(values: Sequence[Optional[Tensor]], zero: Tensor) -> Tensor:
            known = [value.detach() for value in values if value is not None]
            return sum(known) if known else zero
        losses = [None if gate.aux_loss is None else gate.aux_loss * share
                  for gate, share in zip(self.gates, self._shares())]
        return RoutingStatistics(add([gate.counts for gate in self.gates], none),
                                 add([gate.dropped for gate in self.gates], none),
                                 add(losses, torch.zeros(())))
