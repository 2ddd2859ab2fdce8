"""Gradients that ranks exchange as int8, and what that rounds away: error feedback.

Rounding every step by itself is biased: in a block with one large value the small ones are 0 in every
step, and what depends on them never learns. So each rank keeps what it did not send, and adds it to
its gradient of the next step: sums over the steps are off by one step's rounding, not by all of them.

Units. A residual is in those of the gradient that the optimiser sees: divided by the number of ranks,
and without a loss scale. So it stays right where either changes.

Invariant. A compressed gradient that is reduced is finite: `fits` asks all ranks before. Where one is
not, or would overflow, all ranks sum this step as it is and keep their residuals; so nothing is lost
or counted twice, whether a loss scaler then leaves the step out or not.
"""

from typing import Dict, List, Mapping, Optional

import torch
from torch import Tensor, nn

from ferry._errors import MismatchError
from ferry.torch.communicators import Communicator

_LARGEST_CODE = 127
#: A normal number, and so is its inverse.
_SMALLEST_SCALE = 2.0 ** -126
#: Of the largest number of a dtype: the rest is for roundings, of the codes and of sums over ranks.
_USABLE = 1.0 - 2.0 ** -12


def _padded(values: Tensor, block: int) -> Tensor:
    """[ceil(n / block), block], the end filled with zeros."""
    return nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)


def _encoded(values: Tensor, block: int) -> Tensor:
    """Finite FP32 [n] as bytes: an FP32 scale for each block, then int8 codes.

    Source: docs/wire-formats.md, quantised rows
    """
    blocks = _padded(values, block)
    scales = (blocks.abs().amax(1) / _LARGEST_CODE).clamp_(min=_SMALLEST_SCALE)
    codes = (blocks * scales.reciprocal().unsqueeze(1)).round_()  # ties to even
    codes = codes.to(torch.int8).view(-1)[:values.numel()]
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])


def _decoded(message: Tensor, num_values: int, block: int) -> Tensor:
    """The FP32 values of `_encoded`: the same bits on every rank, products rounded once."""
    scale_bytes = 4 * -(-num_values // block)
    scales = message[:scale_bytes].clone().view(torch.float32)  # a row may begin at any byte
    codes = _padded(message[scale_bytes:].view(torch.int8).float(), block)
    return codes.mul_(scales.unsqueeze(1)).view(-1)[:num_values]


class GradientCompressor:
    """Makes `reduce_gradients` gather int8 with error feedback instead of summing FP32.

        compressor = GradientCompressor(model)
        reduce_gradients(model, world, split.expert_data_parallel, compressor=compressor)

    model       whose gradients are reduced; one compressor for each model and rank, kept over steps
    block       values that share one FP32 scale
    loss_scale  what the gradients are multiplied with when they are reduced; set it before each step,
                as aux_loss_scale, unless gradients are unscaled before. 1 = they are not scaled
    Ensures:  every rank has the same bits, sums in FP32 in rank order. Where a gradient of any rank is
              not finite, the step is summed without compression and changes nothing here. Gradients of
              float64 parameters, and those that nobody shares, are not compressed
    Memory:   FP32, as large as the parameters that are reduced
    Cost:     each rank gets R x (1 + 4 / block) bytes a value, from R ranks: with 128, 0.26 of what a
              Ferry group gathers uncompressed. An all_reduce of MPI or torch.distributed moves about 8
              bytes a value for any R, so there it pays below 8 ranks
    Errors:   ValueError (block, loss_scale)
    Source:   Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient
              Compression Schemes, ICML 2019, algorithm 2 (EF-SGD)
    """

    def __init__(self, model: nn.Module, *, block: int = 128) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"GradientCompressor: block = {block!r}; allowed: a whole number of "
                             "values, at least 1")
        self.block = block
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._residuals: Dict[Tensor, Tensor] = {}
        self._loss_scale = 1.0

    @property
    def loss_scale(self) -> float:
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if not 0.0 < float(scale) < float("inf"):
            raise ValueError(f"GradientCompressor: loss_scale = {scale}; allowed: a finite number "
                             "above 0")
        self._loss_scale = float(scale)

    def residual(self, parameter: Tensor) -> Optional[Tensor]:
        """What this rank has not sent yet of a parameter's gradient, float32; None = nothing."""
        return self._residuals.get(parameter)

    def replace(self, residuals: Mapping[Tensor, Tensor]) -> None:
        """Copies residuals in; parameters without one have not held anything back."""
        self._residuals = {parameter: residual.detach().to(parameter.device, torch.float32, copy=True)
                           for parameter, residual in residuals.items()}

    def state_dict(self) -> Dict[str, Tensor]:
        """This rank's residuals by the parameter's name: of no use to another rank. For any split of
        the world, give the compressor to `save_checkpoint`."""
        return {name: self._residuals[parameter] for parameter, name in self._names.items()
                if parameter in self._residuals}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what state_dict gave on this rank.

        Errors: ValueError (a name or a shape that the model does not have); nothing has changed then
        """
        parameters = {name: parameter for parameter, name in self._names.items()}
        for name, residual in state.items():
            if name not in parameters or parameters[name].shape != residual.shape:
                there = list(parameters[name].shape) if name in parameters else "not there"
                raise ValueError(f"GradientCompressor: the residual of {name!r} is "
                                 f"{list(residual.shape)}, the model's parameter is {there}; fix: "
                                 "load into the model, on the rank, that it was saved of")
        self.replace({parameters[name]: residual for name, residual in state.items()})

    def check_model(self, call: str, model: nn.Module) -> None:
        """Errors: ValueError where it was made for another model"""
        for name, parameter in model.named_parameters():
            if parameter not in self._names:
                raise ValueError(f"{call}: {name!r} is not a parameter of the compressor's model; fix: "
                                 "GradientCompressor(model) of the same model")

    def fits(self, model: nn.Module, everyone: Communicator) -> bool:
        """Whether the gradients of all ranks, with what they carry over, can be sent as int8.

        Ensures: the same answer on every rank
        Errors:  ValueError (another model), MismatchError (compressors that are not alike)
        """
        self.check_model("reduce_gradients", model)
        mine = all(self._fits(parameter, everyone.size) for parameter in model.parameters()
                   if parameter.requires_grad)
        ranks = everyone.gather(torch.tensor([mine, self.block, self.loss_scale],
                                             dtype=torch.float64)).tolist()
        for rank, (_, block, loss_scale) in enumerate(ranks):
            if [block, loss_scale] != ranks[0][1:]:
                raise MismatchError(
                    f"reduce_gradients: the compressor of rank {rank} has block = {int(block)} and "
                    f"loss_scale = {loss_scale}, that of rank 0 {int(ranks[0][1])} and "
                    f"{ranks[0][2]}; fix: the same on every rank")
        return all(fits for fits, _, _ in ranks)

    def _fits(self, parameter: nn.Parameter, num_ranks: int) -> bool:
        """The mean over the ranks is finite in the parameter's dtype if this is so on each of them."""
        value = torch.zeros(1) if parameter.grad is None else parameter.grad.detach()
        if value.dtype != torch.float64:
            value = value.float()
        residual = self._residuals.get(parameter)
        if residual is not None:
            value = value + residual * (self.loss_scale * num_ranks)
        limit = _USABLE * torch.finfo(parameter.dtype).max
        return value.numel() == 0 or float(value.abs().max()) <= limit  # NaN is not

    def sum(self, values: Tensor, parameters: List[nn.Parameter], group: Communicator) -> Tensor:
        """The sum over the ranks of FP32 values, those of `parameters` one after the other; what is
        not sent is kept for the next time. Overwrites `values`."""
        parts = values.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts):
            if parameter in self._residuals:
                part.add_(self._residuals[parameter].reshape(-1), alpha=self.loss_scale)
        size = values.numel()
        message = _encoded(values, self.block)
        messages = group.gather(message)
        total = torch.zeros_like(values)
        for other in messages:
            total += _decoded(other, size, self.block)
        values.sub_(_decoded(message, size, self.block)).div_(self.loss_scale)
        for parameter, part in zip(parameters, parts):
            if parameter not in self._residuals:
                self._residuals[parameter] = torch.empty(parameter.shape, device=parameter.device)
            self._residuals[parameter].copy_(part.view(parameter.shape))
        return total

    def settle(self, parameter: nn.Parameter) -> None:
        """Adds what is left of a parameter that has no copies any more: its gradient is not sent."""
        residual = self._residuals.pop(parameter, None)
        if residual is not None:
            parameter.grad.detach().add_((residual * self.loss_scale).to(parameter.dtype))
