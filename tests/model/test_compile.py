"""Compiled decoder layers: the plain model's gradients, and one compilation for every packing."""

import os
import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from functorch.compile import make_boxed_func, nop
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, DbrxConfig, GPTNeoXConfig, JetMoeConfig, MambaConfig, MixtralConfig

from tests.fixtures.packed import drawn_root, gradient, packed_inputs, relative
from tests.model.tiny import SHAPE, VOCAB, taken, tiny_config
from tuner.model import blocks as compiling
from tuner.model.adapter import LoraSpec, adapter_off, lora_layers
from tuner.model.blocks import apply_recompute, compile_blocks, handing_on_counts
from tuner.model.build import decoder_blocks
from tuner.model.documents import Padding
from tuner.model.native.attention import apply_native_rotation
from tuner.model.native.library import native_problem
from tuner.model.root import CausalLM
from tuner.runtime.device import compiler_problem, triton_problem

# Both come from the tracer itself, for the user's own sake.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*context_fn"),
]
TOKENS, LONGEST = 96, 64
PACKINGS, WARM_UP = 8, 2
LORA = LoraSpec(4, 8.0, 0.0, "all-linear")
DORA = LoraSpec(4, 8.0, 0.0, "all-linear", use_dora=True)


def root_for(kind: str, directory: Path, lora: LoraSpec | None = None, **config: Any) -> CausalLM:
    written = tiny_config(kind)
    written.update(config)
    return drawn_root(written, directory, lora=lora).train()


def packing(number: int) -> tuple[int, ...]:
    """Document lengths that nearly fill a row, other ones for each number."""
    rng, lengths = random.Random(number), list[int]()
    while sum(lengths) < TOKENS - 16:
        lengths.append(rng.randint(1, min(LONGEST, TOKENS - sum(lengths))))
    return tuple(lengths)


def loss(root: CausalLM, number: int) -> torch.Tensor:
    """The loss on a packing."""
    lengths = packing(number)
    ids = torch.randint(3, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(number))
    torch.manual_seed(number)  # where there is dropout
    found: torch.Tensor = root(document_lengths=lengths, **packed_inputs(ids, lengths))
    return found


def take(root: CausalLM, number: int) -> torch.Tensor:
    """The gradient of the loss on a packing."""
    root.zero_grad()
    loss(root, number).backward()
    return gradient(root)


def compilations() -> int:
    return int(counters["stats"]["unique_graphs"])


def check(plain: CausalLM, root: CausalLM, padding: Padding, breaks: int = 0) -> None:
    """Gradients of all packings are the plain model's, and the ones after the warm-up compile nothing.

    There are so many ``breaks``: something is computed outside, and the rest of each function that called it later.
    """
    torch._dynamo.reset()
    counters.clear()
    compile_blocks(root, padding)
    warm = 0
    for number in range(PACKINGS):
        assert relative(take(root, number), take(plain, number)) < 1e-6
        if number < WARM_UP:
            warm = compilations()
    assert 0 < warm <= 4 + breaks
    assert compilations() == warm
    assert counters["graph_break"].total() == breaks


@pytest.fixture
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced and differentiated as for a compilation; their graphs run as they are, without a compiler."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")


@pytest.mark.slow
@pytest.mark.usefixtures("traced_alone")
@pytest.mark.parametrize(
    ("kind", "level", "lora"),
    [
        ("llama", "none", None), ("llama", "selective", None), ("llama", "full", None), ("llama", "none", LORA),
        ("llama", "full", LORA), ("llama", "selective", DORA),
        *((kind, "none", None) for kind in ("qwen3", "gpt2", "gemma3", "mistral")),
    ],
)  # fmt: skip
def test_no_packing_compiles_anew(kind: str, level: Any, lora: LoraSpec | None, tmp_path: Path) -> None:
    root = root_for(kind, tmp_path, lora)
    if level != "none":
        apply_recompute(root, level)
    check(root_for(kind, tmp_path, lora), root, Padding(TOKENS, LONGEST))


@pytest.mark.slow
@pytest.mark.usefixtures("traced_alone")
def test_no_packing_compiles_anew_where_attention_has_dropout(tmp_path: Path) -> None:
    # So little that it draws numbers and drops nothing: what is filled up draws some, too.
    plain, root = (root_for("gpt2", tmp_path, attn_pdrop=1e-9) for _ in range(2))
    check(plain, root, Padding(TOKENS, LONGEST), breaks=4)


@pytest.mark.usefixtures("traced_alone")
def test_mixers_that_are_named_besides_their_layers_stay_outside(tmp_path: Path) -> None:
    """Mamba's scan is a loop over tokens, of which the compiler would make a program as long as the row."""
    shape = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "expand": 1}
    config = MambaConfig(vocab_size=VOCAB, **shape, residual_in_fp32=False)
    plain, root = (drawn_root(config, tmp_path).train() for _ in range(2))
    assert len(decoder_blocks(root.model)) == 2
    check(plain, root, Padding(TOKENS, LONGEST), breaks=3)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_alone")
def test_loops_over_chosen_experts_stay_outside(tmp_path: Path) -> None:
    """DBRX asks which experts were chosen, and takes the tokens of each: numbers that the device has."""
    heads, experts = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, {"moe_num_experts": 4, "moe_top_k": 2}
    config = DbrxConfig(
        vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2, max_seq_len=128, attn_config=heads,
        ffn_config={"hidden_size": 32, "ffn_hidden_size": 48, **experts},
    )  # fmt: skip
    plain, root = (drawn_root(config, tmp_path).train() for _ in range(2))
    check(plain, root, Padding(TOKENS, LONGEST), breaks=4)


def test_models_that_hand_on_counts_are_known() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    shape = {**SHAPE, "num_attention_heads": 4, "kv_channels": 8, "num_key_value_heads": 2}
    with torch.device("meta"):
        jetmoe, mixtral = (
            AutoModelForCausalLM.from_config(kind(**shape, **experts)) for kind in (JetMoeConfig, MixtralConfig)
        )
    assert handing_on_counts(jetmoe) == "JetMoeTopKGating"
    assert handing_on_counts(mixtral) is None


@pytest.mark.skipif(native_problem() is not None, reason=f"no kernels: {native_problem()}")
@pytest.mark.usefixtures("traced_alone")
def test_layers_with_kernels_of_this_processor_are_compiled(tmp_path: Path) -> None:
    """GPT-NeoX's module calls a rotation that is a plain function, which is not what the layers call."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = GPTNeoXConfig(vocab_size=VOCAB, **shape, max_position_embeddings=128, hidden_dropout=0.0)
    plain, root = (drawn_root(config, tmp_path).train() for _ in range(2))
    assert taken(apply_native_rotation, root.model) == 2
    check(plain, root, Padding(TOKENS, LONGEST))


@pytest.mark.skipif(native_problem() is not None, reason=f"no kernels: {native_problem()}")
@pytest.mark.usefixtures("traced_alone")
def test_what_is_left_to_the_interpreter_goes_on_among_kernels_of_this_processor(tmp_path: Path) -> None:
    plain, root = (root_for("llama", tmp_path, attention_dropout=1e-9) for _ in range(2))
    assert taken(apply_native_rotation, root.model) == 2
    check(plain, root, Padding(TOKENS, LONGEST), breaks=4)


class _Rounding(torch.fx.Interpreter):
    """Runs a graph with each number rounded to bf16 between its operations, as if the compiler had fused others."""

    def run_node(self, n: torch.fx.Node) -> Any:
        made = super().run_node(n)
        is_real = isinstance(made, torch.Tensor) and made.is_floating_point()
        return made.bfloat16().to(made.dtype) if is_real else made


def _rounds(graph: torch.fx.GraphModule, _: Any) -> Any:
    return make_boxed_func(_Rounding(graph).run)


@pytest.fixture
def otherwise_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for no gradients rounds otherwise than what trains."""
    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, inference_compiler=_rounds)
    monkeypatch.setattr(compiling, "BACKEND", backend)


@pytest.mark.slow("lora", "dora")
@pytest.mark.usefixtures("otherwise_without_gradients")
@pytest.mark.parametrize("lora", [None, LORA, DORA], ids=["plain", "lora", "dora"])
def test_a_forward_without_gradients_is_the_program_that_trains(lora: LoraSpec | None, tmp_path: Path) -> None:
    """So a reference is the policy that it was, to the bit, with its adapter off too; and nothing more is compiled."""
    torch._dynamo.reset()
    counters.clear()
    root = root_for("llama", tmp_path, lora)
    compile_blocks(root, Padding(TOKENS, LONGEST))
    off = nullcontext if lora is None or lora.use_dora else partial(adapter_off, root.model, decoder_blocks(root.model))
    with torch.no_grad(), off():
        without = loss(root, 0)
    before = compilations()
    trained = loss(root, 0)
    trained.backward()
    assert without.grad_fn is None
    assert torch.equal(without, trained)
    assert compilations() == before
    if lora is not None:
        for _, layer in lora_layers(root.model):
            layer.lora_B["default"].weight.data.fill_(0.5)
        assert not torch.equal(loss(root, 0), without)
        if not lora.use_dora:
            with torch.no_grad(), off():
                assert torch.equal(loss(root, 0), without)
            assert compilations() == before


@pytest.mark.skipif("TUNER_TEST_EVERY_ROW" not in os.environ, reason="half a minute: make campaign ONLY=layouts")
@pytest.mark.skipif(compiler_problem("cpu") is not None, reason=f"cannot compile: {compiler_problem('cpu')}")
def test_compiled_by_the_real_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the processor says of itself is believed: each instruction set would be tried in a process of its own.
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)
    check(root_for("llama", tmp_path), root_for("llama", tmp_path), Padding(TOKENS, LONGEST))


def test_evaluation_is_neither_filled_up_nor_compiled(tmp_path: Path) -> None:
    root, plain = root_for("llama", tmp_path).eval(), root_for("llama", tmp_path).eval()
    counters.clear()
    compile_blocks(root, Padding(TOKENS, LONGEST))
    assert torch.equal(take(root, 0), take(plain, 0))
    assert compilations() == 0


def test_filled_up_with_documents_from_which_nothing_is_learned() -> None:
    ids, places, lengths = Padding(20, 6).fill(torch.arange(3), torch.arange(3), (2, 1))
    assert lengths == (2, 1, 6, 6, 5)
    assert ids.tolist() == [0, 1, 2] + [0] * 17
    assert places.tolist() == [0, 1, 2, *range(6), *range(6), *range(5)]
    full = torch.arange(20)
    assert Padding(20, 6).fill(full, full, (20,))[0] is full
    longer = torch.arange(23)
    assert len(Padding(20, 6).fill(longer, longer, (6, 6, 6, 5))[0]) == 40


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiler_problem("cpu") == "there is no C++ compiler (no-such-compiler)"
    compiler = tmp_path / "c++"
    compiler.touch()
    os.chmod(compiler, 0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    assert compiler_problem("cpu") == "Python's headers are not installed (Python.h)"
    assert compiler_problem("cuda") == "Python's headers are not installed (Python.h)"
    assert triton_problem() == "Python's headers are not installed (Python.h)"
    (tmp_path / "Python.h").touch()
    assert compiler_problem("cpu") is None
    monkeypatch.setenv("CC", "no-such-compiler")
    assert triton_problem() == compiler_problem("cuda") == "there is no C compiler (no-such-compiler)"
    assert compiler_problem("cpu") is None, "which takes the C++ compiler alone"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert triton_problem() == "there is no C compiler (gcc, clang)"
    compiler.rename(tmp_path / "clang")
    assert triton_problem() is None
    monkeypatch.setenv("CXX", str(tmp_path / "clang"))
    assert compiler_problem("cuda") is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert triton_problem() == compiler_problem("cuda") == "triton is not installed"
