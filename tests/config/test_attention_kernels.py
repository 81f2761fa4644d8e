"""Which kernel of attention is chosen for what, as a table."""

from dataclasses import replace

import pytest

from megalite.base.errors import InputError
from megalite.config.attention_kernels import ORDER, Kernel, Machine, Need, broken, choose
from megalite.config.load import load
from megalite.config.rules.validate import check

H100, A100, B200, L40S = (Machine(capability) for capability in ((9, 0), (8, 0), (10, 0), (8, 9)))
PACKAGES: frozenset[Kernel] = frozenset(["flash3", "flash4"])
EVERYTHING = replace(H100, packages=PACKAGES)
MI300X = Machine((9, 4), cudnn=0)
PLAIN = Need()
CHOSEN: list[tuple[Need, Machine | None, Kernel]] = [
    (PLAIN, H100, "cudnn"),
    (PLAIN, B200, "cudnn"),
    (PLAIN, A100, "flash"),
    (PLAIN, L40S, "flash"),
    (PLAIN, MI300X, "flash"),
    (PLAIN, EVERYTHING, "flash3"),
    (PLAIN, replace(H100, packages=frozenset(["flash4"])), "cudnn"),
    (PLAIN, replace(B200, packages=PACKAGES), "flash4"),
    (PLAIN, replace(A100, packages=PACKAGES), "flash"),
    (PLAIN, replace(H100, cudnn=91400), "flash"),
    (PLAIN, replace(H100, cudnn=0), "flash"),
    (PLAIN, replace(H100, refused={"cudnn": "no plan"}), "flash"),
    (PLAIN, replace(EVERYTHING, refused={"flash3": "no symbol", "cudnn": "no plan"}), "flash"),
    (PLAIN, None, "flash"),
    (replace(PLAIN, documents=True), H100, "flash"),
    (replace(PLAIN, window=True), H100, "flash"),
    (replace(PLAIN, documents=True, window=True), EVERYTHING, "flash3"),
    (replace(PLAIN, documents=True), None, "flash"),
    (replace(PLAIN, ring=True), H100, "flash"),
    (replace(PLAIN, ring=True, documents=True), EVERYTHING, "flash3"),
    (replace(PLAIN, capped=True), EVERYTHING, "flex"),
    (replace(PLAIN, capped=True, documents=True, window=True), A100, "flex"),
    (replace(PLAIN, capped=True, ring=True), EVERYTHING, "math"),
    (replace(PLAIN, capped=True), None, "math"),
    (replace(PLAIN, capped=True, precision="fp64"), H100, "math"),
    (replace(PLAIN, sinks=True), EVERYTHING, "flash3"),
    (replace(PLAIN, sinks=True), H100, "flash"),
    (replace(PLAIN, sinks=True, window=True, ring=True), H100, "flash"),
    (replace(PLAIN, sinks=True, precision="fp32"), H100, "math"),
    (replace(PLAIN, sinks=True, width=12, value_width=12), H100, "math"),
    (replace(PLAIN, sinks=True), None, "flash"),
    (replace(PLAIN, deterministic=True), EVERYTHING, "flash"),
    (replace(PLAIN, deterministic=True, documents=True), EVERYTHING, "flash"),
    (replace(PLAIN, width=256, value_width=256), H100, "cudnn"),
    (replace(PLAIN, width=256, value_width=256), B200, "flash"),
    (replace(PLAIN, width=256, value_width=256), replace(B200, packages=PACKAGES), "flash"),
    (replace(PLAIN, width=200, value_width=200), L40S, "efficient"),
    (replace(PLAIN, width=512, value_width=512), H100, "efficient"),
    (replace(PLAIN, width=512, value_width=512, documents=True), H100, "math"),
    (replace(PLAIN, width=12, value_width=12), H100, "flash"),
    (replace(PLAIN, width=12, value_width=12, window=True), H100, "math"),
    (replace(PLAIN, width=192, value_width=128), EVERYTHING, "cudnn"),
    (replace(PLAIN, width=192, value_width=128, documents=True), EVERYTHING, "flash3"),
    (replace(PLAIN, precision="fp32"), EVERYTHING, "efficient"),
    (replace(PLAIN, precision="fp32", width=6, value_width=6), H100, "math"),
    (replace(PLAIN, precision="fp32", window=True), H100, "math"),
    (replace(PLAIN, precision="fp64"), EVERYTHING, "math"),
    (replace(PLAIN, precision="fp64"), None, "flash"),
    (PLAIN, Machine((7, 5)), "math"),
    (replace(PLAIN, precision="fp32"), Machine((7, 5)), "efficient"),
]


@pytest.mark.parametrize(("need", "gpu", "kernel"), CHOSEN)
def test_the_kernel_is_that_of_the_table(need: Need, gpu: Machine | None, kernel: Kernel) -> None:
    assert choose("auto", need, gpu).kernel == kernel


@pytest.mark.parametrize(("need", "gpu", "kernel"), CHOSEN)
def test_what_is_chosen_can_be_asked_for(need: Need, gpu: Machine | None, kernel: Kernel) -> None:
    """And what cannot be asked for is never chosen."""
    assert choose(kernel, need, gpu).kernel == kernel
    for other in ORDER:
        if (rule := broken(other, need, gpu)) is not None:
            with pytest.raises(ValueError, match=f"^{rule.text}".replace("(", r"\(")):
                choose(other, need, gpu)


@pytest.mark.parametrize(
    ("need", "gpu", "reason"),
    [
        (PLAIN, EVERYTHING, "the first of the table"),
        (PLAIN, None, "on a CPU"),
        (replace(PLAIN, capped=True), None, "flash has no cap on scores"),
        (
            PLAIN,
            H100,
            "flash3 needs a package with flash_attn_interface; flash4 needs the package flash-attn-4",
        ),
        (
            replace(PLAIN, deterministic=True),
            replace(EVERYTHING, refused={"flash4": "no symbol"}),
            "flash3 does not repeat itself to the bit; flash4 does not run here: no symbol; "
            "cudnn does not repeat itself to the bit",
        ),
    ],
)
def test_the_reason_is_what_is_against_faster_ones(need: Need, gpu: Machine | None, reason: str) -> None:
    assert choose("auto", need, gpu).reason == reason


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["kernels.attention=cudnn", "data.mask_documents=true", "data.end_of_document=1"],
            "knows no documents and no windows",
        ),
        (["kernels.attention=cudnn", "model.attention.window=100"], "knows no documents and no windows"),
        (["kernels.attention=cudnn", "train.deterministic=true"], "does not repeat itself to the bit"),
        (["kernels.attention=cudnn", "parallel.cp=2"], "needs whole sequences on a rank, with no ring"),
        (["kernels.attention=flash", "model.attention.softcap=30"], "has no cap on scores"),
        (["kernels.attention=flash3", "train.precision=fp32"], "needs bf16"),
    ],
)
def test_a_kernel_that_cannot_be_used_is_refused_with_the_rule(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        check(load([], overrides), 2)
    kernel = overrides[0].partition("=")[2]
    (problem,) = error.value.problems
    advice = "use auto, which chooses for layers of each kind"
    assert str(problem) == f'kernels.attention = "{kernel}": {message}; {advice}'


def test_one_word_for_all_kernels_leaves_attention_to_the_table() -> None:
    for word in ("torch", "triton"):
        assert load([], [f"kernels={word}"]).kernels_by_operation.attention == "auto"
    assert load([], ["kernels=torch", "kernels.attention=math"]).kernels_by_operation.attention == "math"
    with pytest.raises(InputError, match=r"kernels\.attention"):
        load([], ["kernels.attention=torch"])
