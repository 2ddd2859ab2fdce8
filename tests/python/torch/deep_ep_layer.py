"""A layer as its authors wrote it for DeepEP: the calls of the README's example, in autograd functions."""

import torch

from deep_ep import Buffer, EventOverlap

_buffers = {}


def get_buffer(group, hidden_bytes):
    num_nvl_bytes, num_rdma_bytes = 0, 0
    for config in (Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())):
        num_nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, group.size()), num_nvl_bytes)
        num_rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, group.size()),
                             num_rdma_bytes)
    buffer = _buffers.get(group)
    if buffer is None or buffer.num_nvl_bytes < num_nvl_bytes:
        buffer = _buffers[group] = Buffer(group, num_nvl_bytes, num_rdma_bytes)
    return buffer


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, topk_idx, topk_weights, num_experts, result):
        previous_event = Buffer.capture()
        (num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank,
         previous_event) = buffer.get_dispatch_layout(
            topk_idx, num_experts, previous_event=previous_event, async_finish=True,
            allocate_on_comm_stream=previous_event is not None)
        recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=topk_weights,
            num_tokens_per_rank=num_tokens_per_rank,
            num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
            is_token_in_rank=is_token_in_rank, num_tokens_per_expert=num_tokens_per_expert,
            previous_event=previous_event, async_finish=True, allocate_on_comm_stream=True)
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        result.update(handle=handle, counts=counts)
        ctx.mark_non_differentiable(recv_topk_idx)
        return recv_x, recv_topk_idx, recv_topk_weights

    @staticmethod
    def backward(ctx, grad_recv_x, _, grad_recv_topk_weights):
        grad_x, grad_topk_weights, event = ctx.buffer.combine(
            grad_recv_x.contiguous(), ctx.handle, topk_weights=grad_recv_topk_weights,
            async_finish=True)
        event.current_stream_wait()
        return None, grad_x, None, grad_topk_weights, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, handle):
        combined_x, _, event = buffer.combine(x, handle, async_finish=True,
                                              previous_event=EventOverlap(),
                                              allocate_on_comm_stream=True)
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        return combined_x

    @staticmethod
    def backward(ctx, grad_combined_x):
        grad_x, _, _, _, _, event = ctx.buffer.dispatch(grad_combined_x.contiguous(),
                                                        handle=ctx.handle, async_finish=True)
        event.current_stream_wait()
        return None, grad_x, None


def moe(group, x, topk_idx, topk_weights, num_experts, local_experts):
    """local_experts: functions of rows, one per local expert."""
    buffer = get_buffer(group, x.shape[1] * max(x.element_size(), 2))
    result = {}
    recv_x, recv_topk_idx, recv_topk_weights = Dispatch.apply(buffer, x, topk_idx, topk_weights,
                                                              num_experts, result)
    y = torch.zeros_like(recv_x)
    for place, expert in enumerate(local_experts):
        token, slot = (recv_topk_idx == place).nonzero(as_tuple=True)
        assert len(token) == result["counts"][place]
        y = y.index_add(0, token, (expert(recv_x[token]).float()
                                   * recv_topk_weights[token, slot].unsqueeze(1)).to(y.dtype))
    return Combine.apply(buffer, y, result["handle"])
