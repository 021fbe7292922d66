"""What a kernel or an operation is for, from its name.

The names are those of cuBLAS, cuBLASLt, CUTLASS, cuDNN, FlashAttention, Triton as `torch.compile` writes
it, NCCL and their ROCm counterparts, of torch's own kernels, and of ours. The first class whose pattern is
in the name has it: what is exact comes before what is general.
"""

from __future__ import annotations

import re
from functools import cache

from diagnose.core.deep_window import WorkClass

C = WorkClass

NOT_INDUCTORS = r"^(?!triton_(poi|red|per)_).*"
"""Inductor names pointwise kernels and reductions after all that it fused into them, a convolution's bias
too; its products are `triton_tem_`."""

KERNELS: tuple[tuple[WorkClass, str], ...] = (
    (
        C.COLLECTIVE,
        r"nccl|rccl|msccl|nvshmem|cross_device_reduce|multimem_|(one|two)_shot_all_reduce|allreduce_",
    ),
    (C.COPY, r"^mem(cpy|set)\b"),
    (C.ATTENTION, NOT_INDUCTORS + r"(flash_|flash::|flashattn|fmha|attention|_attn|^attn|mem_eff|sdpa)"),
    (
        C.OPTIMIZER,
        r"adam|adagrad|\blamb(?!da)|\blion\b|\bsgd|lars_|rmsprop|adafactor|fused_optim|multi_tensor_apply"
        r"|^(gradient_norm|scale|patch)$",
    ),
    (
        C.MATRIX,
        NOT_INDUCTORS
        + r"((?<!fb)gemm|gemv|cutlass|xmma|_mma_|wgmma|s\d+cudnn|scudnn|hcudnn|cijk_|triton_tem|_mm_"
        r"|\bdot_kernel|splitk|nvjet|conv(?!ert)|winograd|fprop|dgrad|wgrad|implicit_|cublas|_mm$|mm_kernel|ck_tile)",
    ),
    (C.COPY, r"tonhwc|tonchw|nchwto|nhwcto|transpose|catarray|direct_copy|copy_kernel|copy_device|permute"),
    (C.NORM, r"norm(?!al(_|\b))|gammabeta|bn_(fw|bw)|\bbn_|_bn_|welford"),
    (C.REDUCTION, r"reduce|softmax|pool|_sum|triton_(per|red)_|scan|argmax|sort|topk|nll_loss|loss"),
    (
        C.ELEMENTWISE,
        r"elementwise|triton_poi_|fillfunctor|pointwise|unrolled|dropout|index|gather|scatter|embedding|where",
    ),
)

TENSOR_CORES = re.compile(
    r"tensorop|_s\d{3,5}(gemm|fprop|dgrad|wgrad|cudnn)|[hibs]\d*(16816|1688|884|16832|8816)|hmma|imma|gmma|tmaumma"
    r"|\d+x\d+x\d+_tensor|xmma_.*(f16|bf16|tf32|e4m3|e5m2)|(f16|bf16|tf32|e4m3).*xmma|nvjet|sm(90|100)_xmma"
    r"|flash_(fwd|bwd|fprop|bprop)|flashattn(fwd|bwd)sm\d|fmha_cutlass.*(sm8|sm9)|_mi\d+x\d+x\d+",
    re.IGNORECASE,
)
"""The shapes of the instructions of tensor cores are part of the names of kernels that use them."""

LAYOUTS = re.compile(r"tonhwc|tonchw|nchwto|nhwcto|transpose_readwrite", re.IGNORECASE)
"""Kernels that only turn a tensor from one memory format to another."""

OPERATIONS: tuple[tuple[WorkClass, str], ...] = (
    (C.COLLECTIVE, r"^(c10d|gloo|nccl|_c10d_functional|mpi)\b|^record_param_comms"),
    (C.OPTIMIZER, r"^(aten::)?_(fused|foreach)_|^optimizer\."),
    (C.ATTENTION, r"attention|_flash_|_efficient_"),
    (
        C.MATRIX,
        r"::(_?(scaled_)?(grouped_)?mm|addmm|bmm|baddbmm|addbmm|matmul|linear|mv|addmv|dot|einsum|vdot|addr)"
        r"(_|$|\b)|conv|_lstm|_gru|lstm_|gru_|mkldnn_linear|mkl_",
    ),
    (C.NORM, r"norm(?!al(_|\b))"),  # normal_ draws numbers
    (
        C.COPY,
        r"::(copy_?|_to_copy|to|clone|contiguous|cat|_cat|stack|pin_memory|repeat|flip|roll"
        r"|_local_scalar_dense|item|index_put_?|_index_put_impl_)$",
    ),
    (
        C.REDUCTION,
        r"::(sum|mean|max|min|amax|amin|var|std|prod|any|all|argmax|argmin|cumsum|sort|topk|_?softmax"
        r"|_?log_softmax|logsumexp|nll_loss\w*|mse_loss\w*|cross_entropy\w*|_?softmax_backward_data"
        r"|_?log_softmax_backward_data|nonzero|unique\w*|max_pool\w*|avg_pool\w*|adaptive_\w*|mean_\w*)"
        r"(_forward|_backward|_with_indices\w*)?$",
    ),
    (
        C.ELEMENTWISE,
        r"::(add|sub|mul|div|neg|exp|log|sqrt|rsqrt|pow|abs|relu|gelu|silu|sigmoid|tanh|threshold_backward"
        r"|sigmoid_backward|tanh_backward|gelu_backward|silu_backward|where|clamp\w*|fill|zero|lerp|addcmul"
        r"|addcdiv|erf|sin|cos|maximum|minimum|masked_fill|native_dropout\w*|dropout|bernoulli|normal"
        r"|uniform|random|eq|ne|lt|gt|le|ge|embedding\w*|index_select|index|gather|scatter\w*|leaky_relu\w*"
        r"|hardtanh\w*|elu\w*|square|reciprocal|floor|ceil|round|sign|bitwise_\w+|logical_\w+|sgn|floor_divide"
        r"|remainder|addr|triu|tril|arange|randperm|rand|randn|randint|ones|zeros|full)_?$",
    ),
)
"""Of torch's operations, by the names that the profiler and the dispatcher give them."""

IN_OPTIMIZER = frozenset((C.ELEMENTWISE, C.REDUCTION, C.OTHER, C.OPTIMIZER))
"""Classes that are the optimizer's when they run inside its step; a product there stays a product."""


def _compiled(
    patterns: tuple[tuple[WorkClass, str], ...],
) -> tuple[tuple[WorkClass, re.Pattern[str]], ...]:
    return tuple((work, re.compile(pattern, re.IGNORECASE)) for work, pattern in patterns)


_KERNELS, _OPERATIONS = _compiled(KERNELS), _compiled(OPERATIONS)


def kernel_class(name: str) -> WorkClass:
    """Returns what a kernel of a device is for."""
    return _first(name, _KERNELS)


@cache
def operation_class(name: str) -> WorkClass:
    """Returns what an operation is for: `aten::mm`, as in a trace."""
    return _first(name, _OPERATIONS)


def work_of(name: str, in_optimizer: bool) -> WorkClass:
    """Returns what an operation is for, also where an optimizer's step is what it is for."""
    work = operation_class(name)
    return WorkClass.OPTIMIZER if in_optimizer and work in IN_OPTIMIZER else work


def uses_tensor_cores(name: str) -> bool:
    """Whether a kernel's name says so. One whose name does not may still use them."""
    return TENSOR_CORES.search(name) is not None


def changes_layout(name: str) -> bool:
    """Whether a kernel only changes how a tensor lies in memory."""
    return LAYOUTS.search(name) is not None


def _first(name: str, patterns: tuple[tuple[WorkClass, re.Pattern[str]], ...]) -> WorkClass:
    # The innermost functor of a template tells more than what it is a template of; commas keep them apart.
    return next((work for work, pattern in patterns if pattern.search(name)), WorkClass.OTHER)
