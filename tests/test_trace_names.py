"""What a kernel and an operation of a trace are for, known by their names."""

from __future__ import annotations

import pytest
from diagnose.kernels._kernels import kernels

from diagnose.analysis.trace_classes import (
    changes_layout,
    kernel_class,
    operation_class,
    uses_tensor_cores,
    work_of,
)
from diagnose.core.deep_window import WorkClass
from tests.test_trace import ADD, GEMM, NCCL

C = WorkClass
CUTLASS_3 = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, "
    "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<7, "
    "cute::tuple<cute::C<2>, cute::C<1>, cute::C<1>>>, cutlass::bfloat16_t, cute::Layout<cute::C<64>>>>>"
)


@pytest.mark.parametrize(
    "name, work, tensor_cores",
    [
        (GEMM, C.MATRIX, True),
        ("volta_sgemm_128x64_nn", C.MATRIX, False),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>",
            C.MATRIX,
            True,
        ),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", C.MATRIX, True),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopA_TNN", C.MATRIX, True),
        ("sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw", C.MATRIX, True),
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN", C.MATRIX, True),
        ("triton_tem_fused_addmm_relu_3", C.MATRIX, False),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", C.ATTENTION, True),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", C.ATTENTION, True),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
            "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1>>>>>>",
            C.ATTENTION,
            True,
        ),
        ("cudnn_generated_fort_native_sdpa_sm80_flash_fprop_f16_knob_7_64x64x128", C.ATTENTION, True),
        ("cudnn_generated_fort_native_sdpa_sm80_flash_bprop_f16_knob_3_64x64x128", C.ATTENTION, True),
        (CUTLASS_3, C.MATRIX, True),
        ("triton_poi_fused_add_cos_sin_0", C.ELEMENTWISE, False),
        ("triton_poi_fused_convolution_relu_2", C.ELEMENTWISE, False),
        ("triton_poi_fused_mm_6", C.ELEMENTWISE, False),
        ("triton_poi_fused__scaled_dot_product_flash_attention_3", C.ELEMENTWISE, False),
        ("triton_red_fused_convolution_backward_threshold_backward_1", C.REDUCTION, False),
        ("triton_red_fused_native_layer_norm_1", C.NORM, False),
        ("triton_per_fused_sum_2", C.REDUCTION, False),
        (ADD, C.ELEMENTWISE, False),
        ("void at::native::(anonymous namespace)::softmax_warp_forward<float>", C.REDUCTION, False),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>", C.NORM, False),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", C.NORM, False),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            C.OPTIMIZER,
            False,
        ),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>", C.COPY, False),
        ("Memcpy DtoH (Device -> Pageable)", C.COPY, False),
        (NCCL, C.COLLECTIVE, False),
        ("void fbgemm_gpu::_FP8rowwise_to_float_cuda_kernel<float>", C.OTHER, False),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, work: WorkClass, tensor_cores: bool) -> None:
    assert (kernel_class(name), uses_tensor_cores(name)) == (work, tensor_cores)


@pytest.mark.parametrize("name", [entry for each in kernels().values() for entry in each.entries])
def test_each_kernel_of_ours_is_the_optimizers(name: str) -> None:
    assert kernel_class(name) is C.OPTIMIZER


@pytest.mark.parametrize(
    "name, work",
    [
        ("aten::mm", C.MATRIX),
        ("aten::convolution_backward", C.MATRIX),
        ("aten::scaled_dot_product_attention", C.ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", C.ATTENTION),
        ("aten::native_layer_norm_backward", C.NORM),
        ("aten::_softmax", C.REDUCTION),
        ("aten::add_", C.ELEMENTWISE),
        ("aten::normal_", C.ELEMENTWISE),
        ("aten::_fused_adamw_", C.OPTIMIZER),
        ("aten::_local_scalar_dense", C.COPY),
        ("c10d::allreduce_", C.COLLECTIVE),
        ("gloo:all_reduce", C.COLLECTIVE),
        ("aten::view", C.OTHER),
    ],
)
def test_an_operation_is_known_by_its_name(name: str, work: WorkClass) -> None:
    assert operation_class(name) == work


def test_inside_an_optimizer_all_but_products_and_copies_is_the_optimizers() -> None:
    assert work_of("aten::add_", True) == work_of("aten::view", True) == C.OPTIMIZER
    assert (work_of("aten::mm", True), work_of("aten::copy_", True)) == (C.MATRIX, C.COPY)


def test_only_a_kernel_that_converts_changes_the_layout() -> None:
    assert changes_layout("void cudnn::ops::nhwcToNchwKernel<float>")
    assert not changes_layout(GEMM) and not changes_layout(CUTLASS_3)
