"""Tiny models whose attention takes the branch of CUDA on tensors of the CPU, against the branch of the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DeepseekV3Config, Gemma2Config, GptOssConfig, PretrainedConfig

from tests.fixtures.packed import drawn_root, gradient, packed_inputs, relative
from tests.model import varlen_stand_in  # noqa: F401 - torch's flash attention has its kernels
from tests.model.test_compile import LONGEST, TOKENS, packing
from tests.model.tiny import SHAPE, VOCAB, tiny_config
from tuner.model import blocked_attention, cuda_attention, triton_attention
from tuner.model import blocks as compiling
from tuner.model.adapter import LoraSpec
from tuner.model.attention_ops import LN_2, Scope
from tuner.model.blocks import apply_recompute, compile_blocks
from tuner.model.documents import Padding
from tuner.model.root import CausalLM
from tuner.runtime.device import traced_for

LORA = LoraSpec(4, 8.0, 0.0, "all-linear")
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}


def config_of(kind: str) -> PretrainedConfig:
    """Heads of 16 channels; of 12 (`narrow`); DeepSeek's, of 12 and 6 for values; Gemma 2's cap; gpt-oss's sinks."""
    if kind == "deepseek":
        names = {"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1, "num_key_value_heads": 4}
        return DeepseekV3Config(**SHAPE | LATENT | EXPERTS | names)
    if kind == "gemma2":
        names = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8, "query_pre_attn_scalar": 16}
        return Gemma2Config(**SHAPE | names | {"head_dim": 16})
    if kind == "gpt_oss":
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16, "sliding_window": 8}
        return GptOssConfig(**SHAPE | experts | {"architectures": ["GptOssForCausalLM"]})
    config = tiny_config("llama" if kind == "narrow" else kind)
    config.head_dim = 12 if kind == "narrow" else 16
    return config


def root_for(kind: str, directory: Path, lora: LoraSpec | None = None, level: Any = "none") -> CausalLM:
    root = drawn_root(config_of(kind), directory, lora=lora)
    if level != "none":
        apply_recompute(root, level)
    return root.train()


def take(
    root: CausalLM, lengths: tuple[int, ...], precision: torch.dtype = torch.bfloat16
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a packed row."""
    ids = torch.randint(3, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    root.zero_grad()
    torch.manual_seed(4)  # of dropout
    with torch.autocast("cpu", torch.bfloat16, precision == torch.bfloat16, cache_enabled=False):
        loss = root(document_lengths=lengths, **packed_inputs(ids, lengths))
    loss.backward()
    return float(loss.detach()), gradient(root)


def check(  # noqa: PLR0917 - what a case is made of
    kind: str, directory: Path, level: Any = "none", lora: LoraSpec | None = None, backend: str = "",
    allowed: float = 1e-3,
) -> None:
    """The branch of CUDA gives the loss and the gradients of the blocks of products, in two rows."""
    plain, root = root_for(kind, directory, lora), root_for(kind, directory, lora, level)
    with patch.object(compiling, "BACKEND", backend or compiling.BACKEND):
        if backend:
            compile_blocks(root, Padding(TOKENS, LONGEST))
        for number in range(2):
            with traced_for("cuda"), patch.object(cuda_attention, "way_on", lambda *given: "blocks"):
                expected_loss, expected = take(plain, packing(number))  # the loss of CUDA, too
            with traced_for("cuda"):
                loss, found = take(root, packing(number))
            assert loss == pytest.approx(expected_loss, rel=1e-4)
            assert relative(found, expected) < allowed


def heads_in(
    dtype: torch.dtype, n: tuple[int, int], widths: tuple[int, int], tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value ``[heads, tokens, width]`` as projections leave them: heads inside tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((n[0], widths[0]), (n[1], widths[0]), (n[1], widths[1]))
    made = [torch.randn(tokens, *shape, generator=generator).to(dtype).transpose(0, 1) for shape in shapes]
    query, key, value = (tensor.requires_grad_() for tensor in made)
    return query, key, value


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel: what it was told."""

    name: str
    bound: int
    longest: int
    window: int
    cap: float


@contextmanager
def triton_stand_in() -> Iterator[list[Launch]]:
    """Within, blocks of products fill what the Triton kernels would; the kernels are run by `test_triton_attention`."""
    launches: list[Launch] = []

    def launch(name: str, tensors: dict[str, torch.Tensor], asked: Scope) -> None:
        query, key, value, bounds = (tensors[one] for one in ("query", "key", "value", "bounds"))
        assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        window, scale, cap = asked.window, asked.scale, asked.cap
        launches.append(Launch(name, int(asked.longest), int(bounds.diff().max()), window, cap))
        if name == "launch_forward":
            none = torch.full((len(query),), -torch.inf)
            given = (query, key, value, bounds, window, scale, cap, none)
            output, normaliser = blocked_attention.attend_with_sinks(*given)
            tensors["output"].copy_(output)
            tensors["normaliser"].copy_(normaliser / LN_2)
            return
        assert tensors["upstream"].is_contiguous() and tensors["output"].is_contiguous()
        heads = (query, key, value)
        given = (tensors["upstream"], *heads, bounds, window, scale, cap, tensors["normaliser"] * LN_2)
        for which, grad in zip(("query", "key", "value"), blocked_attention._backward(*given), strict=True):
            tensors[f"grad_{which}"].copy_(grad)

    with patch.object(triton_attention, "launch", launch):
        yield launches
