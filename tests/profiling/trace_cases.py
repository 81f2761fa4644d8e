"""A small trace in the format of a GPU: one step of 1000 µs, on four streams. All times are microseconds."""

from typing import Any

from megalite.config.layout import Layout

GROUPS = [("0", "default_pg"), ("2", "mesh_pp"), ("3", "mesh_fsdp"), ("4", "mesh_tp"), ("5", "world")]
F, B = "F(stage 0, micro-batch 0)", "B(stage 0, micro-batch 0)"


def event(category: str, name: str, lane: object, start: float, end: float, **details: Any) -> dict[str, Any]:
    args = {key.replace("_", " "): value for key, value in details.items()}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": lane,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def note(what: str, start: float, end: float) -> dict[str, Any]:
    return event("user_annotation", f"note: {what}", 99, start, end)


def kernel(name: str, stream: int, start: float, end: float, correlation: int, **details: Any) -> dict[str, Any]:
    return event("kernel", name, stream, start, end, stream=stream, correlation=correlation, **details)


def launch(at: float, correlation: int) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernel", 99, at, at + 3, correlation=correlation)


def nccl(name: str, stream: int, start: float, end: float, group: str, description: str) -> dict[str, Any]:
    details = {"Process Group Name": group, "Process Group Description": description}
    return kernel(f"ncclDevKernel_{name}(ncclDevKernelArgsStorage<4096ul>)", stream, start, end, 0, **details)


EVENTS = [
    note("profiled steps", 0, 1000),
    note("reading a batch", 0, 100),
    note(f"{F} (entry 1 of 2)", 100, 200),
    note(f"{B} (entry 2 of 2)", 200, 300),
    note("updating the weights", 700, 1000),
    *(launch(at, number) for number, at in ((1, 110), (2, 120), (3, 210), (4, 220), (5, 710), (6, 230))),
    kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", 7, 120, 320, 1),
    kernel("void flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(Flash_fwd_params)", 7, 320, 420, 2),
    kernel("_add_rms_norm_kernel", 7, 420, 450, 3),
    kernel("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", 7, 450, 470, 4),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 640, 660, stream=7, correlation=6),
    kernel("_updated_kernel", 7, 800, 900, 5),
    nccl("AllGather_RING_LL", 20, 250, 350, "3", "mesh_fsdp"),
    nccl("ReduceScatter_Sum_bf16_RING_LL", 20, 440, 600, "3", "undefined"),
    event("cpu_op", "record_param_comms", 99, 240, 245, External_id=77, Process_Group_Name="4"),
    kernel(
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 24, 550, 650, 9, External_id=77
    ),
    nccl("SendRecv(ncclDevKernelArgsStorage<4096ul>)", 28, 660, 700, "2", "mesh_pp"),
]


def content(events: list[dict[str, Any]] = EVENTS, **about: Any) -> dict[str, Any]:
    """The content of a trace's file."""
    return {
        "megalite": {
            "rank": 0,
            "first": 5,
            "last": 5,
            "pp": 1,
            "coordinates": Layout().coordinates(0),
            "axes": {},
            "expected": None,
            **about,
        },
        "distributedInfo": {"pg_config": [{"pg_name": name, "pg_desc": told} for name, told in GROUPS]},
        "traceEvents": events,
    }
