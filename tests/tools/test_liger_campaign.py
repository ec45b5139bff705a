"""The campaign of liger's kernels in its smallest form: those of one type, two of them compiled, and a fault found."""

from dataclasses import replace

import pytest

from tools.liger_campaign import launches, problem, type_of


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.slow
def test_kernels_compile_ahead_of_time_and_a_wrong_launch_does_not() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    found = {launch.name: launch for launch in launches("llama")}
    both = {f"_{layer}_{way}_kernel" for layer in ("rms_norm", "swiglu") for way in ("forward", "backward")}
    assert set(found) == both | {"liger_cross_entropy_kernel"}
    assert dict(found["liger_cross_entropy_kernel"].types)["X_ptr"] == "*bf16"
    for name, capability in (("_rms_norm_forward_kernel", 80), ("_swiglu_backward_kernel", 90)):
        assert problem(found[name], capability) is None
    wrong = found["_swiglu_forward_kernel"]
    numbers = tuple((name, "i32" if name == "a_ptr" else kind) for name, kind in wrong.types)
    said = problem(replace(wrong, types=numbers), 90)
    assert said is not None and "Error" in said


@pytest.mark.parametrize(("value", "kind"), [(True, "i1"), (3, "i32"), (1 << 31, "i64"), (0.5, "fp32")])
def test_numbers_have_the_types_that_triton_gives_them(value: float, kind: str) -> None:
    assert type_of(value) == kind
