"""Ferry for PyTorch: gates, experts, and what trains them over many ranks. PyTorch 1.13 and later.

    gates       SoftmaxGate, SigmoidGate, GateOutput         FP32, deterministic, with capacity
    losses      switch_loss, variance_loss, z_loss, update_selection_bias
    layer       MoELayer, set_aux_loss_scale                 all of it, pipelined
    dispatcher  Dispatcher                                   plan, dispatch, combine with gradients
    experts     GroupedExperts, SharedExperts, grouped_swiglu
    parallel    expert_parameters, reduce_gradients, clip_grad_norm_, split_world
    compression GradientCompressor                       gradients as int8, with error feedback
    saving      save_checkpoint, load_checkpoint             on disk, for any split and placement
    recording   record_routing, write_trace                  routing traces that `ferry` reads
    sparse      sparse_all_to_all                            tensors of which the largest values cross

docs/pytorch.md says how they fit together.
"""

from ferry.torch.communicators import Communicator, as_communicator
from ferry.torch.compression import GradientCompressor
from ferry.torch.dispatcher import Dispatcher, ExpertTokens
from ferry.torch.experts import GroupedExperts, SharedExperts, grouped_swiglu
from ferry.torch.gates import GateOutput, SigmoidGate, SoftmaxGate, TopkGate, topk_from_logits
from ferry.torch.layer import MoELayer, RoutingStatistics, set_aux_loss_scale
from ferry.torch.losses import (count_variance, expert_counts, switch_loss, update_selection_bias,
                                variance_loss, z_loss)
from ferry.torch.parallel import (clip_grad_norm_, dense_parameters, expert_parameters,
                                  ignore_experts_in_ddp, mark_experts, reduce_gradients,
                                  split_world)
from ferry.torch.recording import RoutingRecorder, record_routing, write_trace
from ferry.torch.saving import (checkpoint_extra, latest_checkpoint, load_checkpoint,
                                save_checkpoint)
from ferry.torch.sparse import sparse_all_to_all

__all__ = [
    "Communicator", "Dispatcher", "ExpertTokens", "GateOutput", "GradientCompressor",
    "GroupedExperts", "MoELayer", "RoutingRecorder", "RoutingStatistics", "SharedExperts",
    "SigmoidGate", "SoftmaxGate", "TopkGate", "as_communicator", "checkpoint_extra",
    "clip_grad_norm_", "count_variance", "dense_parameters", "expert_counts", "expert_parameters",
    "grouped_swiglu", "ignore_experts_in_ddp", "latest_checkpoint", "load_checkpoint",
    "mark_experts", "record_routing", "reduce_gradients", "save_checkpoint", "set_aux_loss_scale",
    "sparse_all_to_all", "split_world", "switch_loss", "topk_from_logits",
    "update_selection_bias", "variance_loss", "write_trace", "z_loss",
]
