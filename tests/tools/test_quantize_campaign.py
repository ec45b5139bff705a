"""The campaign of quantised weights finds codes and values that are not the peer's, and kernels that do not compile."""

from types import SimpleNamespace

import pytest
import torch

from tests.model.quantize import drawn
from tools import quantize_campaign
from tuner.model.quantize.codes import dequantize, quantize


def peer(wrong: float) -> SimpleNamespace:
    """A stand-in for bitsandbytes, whose scales are wrong by a factor."""

    def quantize_4bit(weight: torch.Tensor, **_: object) -> tuple[torch.Tensor, SimpleNamespace]:
        made = quantize(weight, "nf4")
        return made.codes.view(-1, 1), SimpleNamespace(absmax=made.scales[:, 0] * wrong, dtype=weight.dtype)

    def dequantize_4bit(packed: torch.Tensor, state: SimpleNamespace) -> torch.Tensor:
        return dequantize(packed.view(-1, 32), state.absmax[:, None], 64, state.dtype)

    def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        made = quantize(weight, "int8")
        return made.codes, made.scales[:, 0] * wrong, None

    functional = SimpleNamespace(
        quantize_4bit=quantize_4bit, dequantize_4bit=dequantize_4bit, int8_vectorwise_quant=quantize_rows,
        int8_vectorwise_dequant=lambda codes, scales: dequantize(codes, scales[:, None], 64),
    )
    return SimpleNamespace(functional=functional, __version__="a stand-in")


def test_what_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_campaign, "_boundaries", lambda peer: iter(()))
    assert [*quantize_campaign.blocks(peer(1.0))] == []
    found = "\n".join(quantize_campaign.blocks(peer(1 + 2**-23)))
    assert "scales of 1000 differ" in found and "float32 values of" in found and "int8: codes or scales" in found
    assert "the tests hold another" in found


def test_a_kernel_compiles() -> None:
    pytest.importorskip("triton")
    from tuner.model.quantize import triton_rows

    assert quantize_campaign.compiled(triton_rows._pairs, "nf4", "*bf16", 90) is None


def test_drawn_weights_are_what_they_were() -> None:
    found = drawn.sha256(drawn.blocks(torch.float32))
    assert found == "0bb806dd9ae5e274d4d9c0541846669d7331b4af6964c47db055e9cd6c47297e"
