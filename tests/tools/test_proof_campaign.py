"""Proofs of a few layers and predictions for a GPU, in their smallest form, and faults that they must find."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

from tests.model.tiny import SHAPE
from tools import cuda_campaign
from tools.causal_cases import VOCAB, tiny_config
from tools.cuda_campaign import MODES, KernelRefused, check_flash, examine
from tools.proof_campaign import deep_config, made, verdict, write_random
from tools.proof_faults import FAULTS, Fault
from tuner.errors import RecipeError
from tuner.model import probe, widened
from tuner.model.attention import Unsupported
from tuner.model.build import decoder_blocks, meta_model
from tuner.model.few_layers import FewLayers, representatives, shared_kinds
from tuner.model.probe import plain_twin, require_isolation
from tuner.model.root import CausalLM
from tuner.model.wrap import wrappers_of
from tuner.profile import tracing
from tuner.profile.tracing import refusing

SAMPLED = (
    "documents are one in attention, llama, one in the middle", "a state over documents, mamba2, one in the middle",
    "one expert a token, mixtral, last layer", "a hook that adds, llama, one in the middle",
    "an adapter that is not called, one in the middle", "code that counts layers off", "a class that knows a number",
)  # fmt: skip


def deep(model_type: str, directory: Path, adapter: bool = False) -> CausalLM:
    """A model of eight layers as training builds it."""
    write_random(deep_config(model_type, 8), directory)
    return made(directory, adapter)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many layers ran in the last proof that was begun."""
    counts: list[int] = []
    kept = FewLayers.running

    def running(self: FewLayers, plain: PreTrainedModel) -> object:
        counts.append(len(self.chosen))
        return kept(self, plain)

    monkeypatch.setattr(FewLayers, "running", running)
    yield counts


def test_what_rounding_moves_in_a_deep_mixture_is_no_leak(tmp_path: Path) -> None:
    write_random(deep_config("minimax", 16), tmp_path)
    root = made(tmp_path, False)
    assert require_isolation(root, VOCAB, every_layer=True).is_clean
    plain, ids = plain_twin(root.model), torch.arange(9) * 7
    with torch.no_grad():
        moved = probe._rounding(plain, ids, probe._plain_logits(plain, ids))
    assert 1e-6 < moved < 5e-5, "16 layers with experts and states round more than a tiny model"
    assert probe._allowed(5e-7, lambda: 1.0) == probe._allowed(2e-6, None) == probe._allowed(2e-6, lambda: 0.0) == 1e-6
    assert probe._allowed(2e-6, lambda: moved) == 2 * moved
    assert probe._allowed(1.0, lambda: 1.0) == 1e-4, "whatever rounding does, documents do not see each other"


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [("llama", 2), ("gemma3_text", 4), ("mamba2", 2), ("zamba2", 4), ("deepseek_v3", 3), ("hrm_text", 4),
     ("reformer", 4), ("inkling2_text", 6)],
)
def test_the_first_and_the_last_of_each_kind_run(model_type: str, layers: int, tmp_path: Path, ran: list[int]) -> None:
    report = require_isolation(deep(model_type, tmp_path), VOCAB)
    assert report.is_clean and ran == [layers]


@pytest.mark.parametrize("name", SAMPLED)
def test_a_planted_fault_is_refused(name: str, tmp_path: Path) -> None:
    fault = next(one for one in FAULTS if one.name == name)
    with fault.around():
        root = deep(fault.model_type, tmp_path, fault.adapter)
        require_isolation(root, VOCAB)  # without the fault
        fault.plant(root)
        with pytest.raises(RecipeError):
            require_isolation(root, VOCAB)


def test_a_fault_in_the_values_of_one_layer_is_found_by_all_of_them(tmp_path: Path) -> None:
    fault: Fault = next(one for one in FAULTS if one.of_values)
    with fault.around():
        root = deep(fault.model_type, tmp_path)
        fault.plant(root)
        require_isolation(root, VOCAB)
        with pytest.raises(RecipeError):
            require_isolation(root, VOCAB, every_layer=True)


def test_what_few_layers_do_not_pass_is_judged_by_all(tmp_path: Path, ran: list[int]) -> None:
    root = deep("llama", tmp_path)
    needing = decoder_blocks(root.model)[7]
    forward = needing.forward

    called: list[object] = []

    def after_all(*args: Any, **kwargs: Any) -> Any:
        assert len(called) == 7, "those before ran"
        return forward(*args, **kwargs)

    root.model.model.register_forward_pre_hook(lambda *_: called.clear())
    for block in decoder_blocks(root.model)[:7]:
        block.mlp.register_forward_hook(lambda *_: called.append(1))
    needing.forward = after_all
    assert require_isolation(root, VOCAB).is_clean
    assert ran == [3]


def test_the_weights_of_rwkv_are_not_divided_for_evaluation(tmp_path: Path) -> None:
    root = deep("rwkv", tmp_path)
    assert verdict(root, every_layer=True) == ("passes", "all")
    assert verdict(root, every_layer=False) == ("passes", "3 of 8")


def test_layers_are_as_they_were_afterwards(tmp_path: Path) -> None:
    root = deep("llama", tmp_path)
    before = [dict(vars(block)) for block in decoder_blocks(root.model)]
    require_isolation(root, VOCAB)
    after = [dict(vars(block)) for block in decoder_blocks(root.model)]
    assert [sorted(one) for one in before] == [sorted(one) for one in after]
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in decoder_blocks(root.model))


def test_layers_called_otherwise_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[int]) -> None:
    def forward(self: Any, input_ids: torch.Tensor, position_ids: Any = None, **given: Any) -> BaseModelOutputWithPast:
        hidden = self.embed_tokens(input_ids)
        position_ids = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        rotations = [self.rotary_emb(hidden, position_ids * step) for step in (1, 2)]
        for place, layer in enumerate(self.layers):
            hidden = layer(hidden, position_embeddings=rotations[place == 4], **given)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    monkeypatch.setattr(LlamaModel, "forward", forward)
    require_isolation(deep("llama", tmp_path), VOCAB)
    assert ran == [2, 3]


def test_what_is_another_one_in_every_layer_tells_none_apart() -> None:
    facts: list[dict[str, object]] = [{"number": place, "window": 8 if place == 2 else 0} for place in range(5)]
    assert representatives(shared_kinds(facts)) == {0, 2, 4}  # type: ignore[arg-type]
    assert representatives(shared_kinds([{"number": place} for place in range(5)])) == {0, 4}
    assert representatives(shared_kinds([{"a": 1}, {"a": 2}])) == {0, 1}
    assert representatives(shared_kinds([{}, {"a": 1}, {"a": 2}, {"a": 3}])) == {0, 1, 3}


def in_bf16(**more: Any) -> Any:
    """A llama of four layers whose weights spread."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE | {"num_hidden_layers": 4} | more)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_large_embeddings_and_output_layers_are_looked_at_in_part(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_bf16(vocab_size=512, tie_word_embeddings=tied).eval()
    ids, plain = torch.arange(9)[None] * 31, plain_twin(model)
    whole = widened.Widened(model, narrow=False)
    with torch.no_grad(), whole.computing(plain):
        expected = plain(input_ids=ids, use_cache=False).logits
    monkeypatch.setattr(widened, "LARGE", 1024)
    monkeypatch.setattr(widened, "ROWS", 128)
    with torch.no_grad(), widened.Widened(model, narrow=True).computing(plain):
        found = plain(input_ids=ids, use_cache=False).logits
    assert found.dtype == torch.float32 and found.shape[-1] == 128
    torch.testing.assert_close(found, expected[..., :128], rtol=0, atol=1e-5)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_of_linear_layers_a_block_at_a_time_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_bf16(attention_bias=True)
    ids = torch.arange(9)[None] * 7
    with torch.no_grad(), widened.Widened(model, narrow=True).computing(model):
        expected = model(input_ids=ids, use_cache=False).logits
    monkeypatch.setattr(widened, "BLOCK", 100)  # three rows, and what is left
    types: set[torch.dtype] = set()
    for layer in (part for part in model.modules() if isinstance(part, nn.Linear)):
        layer.register_forward_hook(lambda of, *_: types.add(of.weight.dtype))
    with widened.Widened(model, narrow=True).computing(model):
        found = model(input_ids=ids, use_cache=False).logits
    assert found.requires_grad  # as what comes before them has a gradient
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert types == {torch.bfloat16} and not any(map(wrappers_of, model.modules()))


SEES: dict[str, Callable[[int, int], Sequence[int]]] = {
    "the one before": lambda place, _: range(place)[-1:],
    "the one after": lambda place, count: range(place + 1, count)[:1], "all before": lambda place, _: range(place),
    "the first": lambda place, _: range(min(place, 1)),
    "the last": lambda place, count: range(max(place + 1, count - 1), count),
}
"""Of a document at a place among so many: which others it sees."""


@pytest.mark.parametrize("others", SEES)
def test_what_a_document_sees_of_any_other_in_its_row_is_a_leak(others: str) -> None:
    table = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))

    class Seeing:
        model = nn.Identity()

        def __init__(self, share: float) -> None:
            self._share = share

        def logits(self, ids: torch.Tensor, _: object, lengths: tuple[int, ...], positions: Any) -> torch.Tensor:
            own = [table[document].cumsum(0) for document in ids.split(lengths)]
            seen = [sum(own[other].sum() for other in SEES[others](k, len(own))) for k in range(len(own))]
            return torch.cat([one + self._share * more for one, more in zip(own, seen, strict=True)])[positions]

    documents, changed = (torch.arange(7), torch.arange(9) + 20), (torch.arange(7) + 3, torch.arange(9) + 21)
    changed[1][:5] = documents[1][:5]
    alone = table[documents[1]].cumsum(0)
    assert probe._compare(Seeing(0.0), alone, documents, changed, None).is_clean  # type: ignore[arg-type]
    found = probe._compare(Seeing(1e-5), alone, documents, changed, None)  # type: ignore[arg-type]
    assert found.against_alone < probe.DIFFERENCE_ALLOWED
    assert found.is_clean == (others in ("the one after", "the last"))  # the first document is never asked


REFUSED = {
    "bert": "does not compute: bidirectional attention",
    "dbrx": "DbrxForCausalLM cannot be predicted: its own code does not run without masks, or on tensors without",
    "musicgen": "no text model of its own",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_that_cannot_be_predicted_is_refused_with_the_reason(model_type: str) -> None:
    found = examine(model_type, "h100-80g", modes=("full",)).modes["full"]
    assert found.verdict == "refused" and REFUSED[model_type] in found.reason


def test_what_no_kernel_takes_and_a_bug_of_ours_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_campaign, "WIDEST", 7)
    found = examine("llama", "h100-80g", modes=("full",)).modes["full"]
    assert found.verdict == "crashed" and "more than 7" in found.reason
    monkeypatch.setattr(tracing, "optimizer_step", lambda *given: torch.ones(2) @ torch.ones(3))
    assert examine("llama", "h100-80g", modes=("full",)).modes["full"].verdict == "crashed"


WIDE = torch.empty(4, 10, 16, dtype=torch.bfloat16)
BOUNDS = torch.tensor([0, 10], dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda q, k, v, b: (q.repeat(1, 1, 17), k, v, b), "272 columns"),
        (lambda q, k, v, b: (q, k[:3], v[:3], b), "4 query heads on 3"),
        (lambda q, k, v, b: (q, k, v[:3], b), "4 key and 3 value heads"),
        (lambda q, k, v, b: (q, k, v.float(), b), "types"),
        (lambda q, k, v, b: (q, k, v, b.long()), "int64"),
    ],
)
def test_what_flash_attention_demands(change: Callable[..., Any], why: str) -> None:
    check_flash(WIDE, WIDE[:2], WIDE[:2, :, :8], BOUNDS)
    with pytest.raises(KernelRefused, match=why):
        check_flash(*change(WIDE, WIDE, WIDE, BOUNDS))


@pytest.mark.slow("full", "again")
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_asks_for_numbers_is_refused_in_every_mode(mode: str) -> None:
    """Recomputing notes what a router chose by a mode of its own, between the model and torch."""
    found = examine("longcat_flash", "h100-80g", modes=(mode,)).modes[mode]
    assert (found.verdict, "cannot be predicted" in found.reason) == ("refused", True), found


def test_only_the_models_own_errors_are_refusals() -> None:
    model = meta_model(tiny_config("llama"), torch.float32)
    with pytest.raises(RecipeError, match="cannot be predicted"), refusing(model):
        model.model(input_ids=None, inputs_embeds=None)  # transformers itself refuses it
    with pytest.raises(RecipeError, match="cannot be trained"), refusing(model):
        raise Unsupported("a thing")
    with pytest.raises(RuntimeError), refusing(model):
        torch.ones(2) @ torch.ones(3)
