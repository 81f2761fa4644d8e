"""Kinds of kernels and operators by their names, and axes of process groups by their descriptions."""

import ast
from pathlib import Path

import pytest

from megalite.distributed.mesh import PAIRS
from megalite.profiling.kinds import COMMUNICATION, axis_of, kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "matmul"),
        ("aten::addmm", "matmul"),
        ("aten::linear", "matmul"),
        ("megalite::linear", "matmul"),
        ("mkldnn::_linear_pointwise", "matmul"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("megalite::linear_cross_entropy", "fused"),
        ("triton_red_fused__to_copy_mul_sum_3", "fused"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::OpaqueType<2u>>", "copy"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("Memset (Device)", "copy"),
        ("aten::_to_copy", "copy"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps>>", "pointwise"),
        ("aten::mul", "pointwise"),
        ("aten::_fused_adamw_", "optimizer"),
    ],
)
def test_names_tell_the_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    assert COMMUNICATION.search(name) is None


def test_kernels_of_the_project_are_known() -> None:
    found = {}
    for path in Path("kernels").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                found[node.name] = path.stem
    kinds = {name: kind_of(name) for name in found if name.startswith("_")}
    assert len(kinds) > 8
    assert "pointwise" not in kinds.values()
    assert (kinds["_adamw_kernel"], kinds["_rms_norm_forward"], kinds["_stats_kernel"]) == (
        "optimizer",
        "fused",
        "fused",
    )


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t",
        "void ncclSymAllGatherKernel_LL(ncclSymArgs)",
        "gloo:all_reduce",
    ],
)
def test_names_tell_communication(name: str) -> None:
    assert COMMUNICATION.search(name)


def test_descriptions_tell_the_axis() -> None:
    told = {"mesh_tp": "tp", "mesh_pp": "pp", "mesh_fsdp": "dp", "mesh_dp_replicate": "dp", "cp": "cp", "world": "all"}
    told |= dict.fromkeys(PAIRS, "pp")
    assert {description: axis_of(description) for description in told} == told
    assert axis_of("checkpoints") == "other"
