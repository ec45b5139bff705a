"""Documents that do not lie end to end: each is computed as transformers computes it alone, in values and gradients."""

from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.packed import drawn_root, packed_inputs, relative
from tests.model.tiny import TOKENS, VOCAB, tiny_config
from tuner.errors import RecipeError
from tuner.model import attention
from tuner.model.apart import COMPUTED_AT_MOST, computed_tokens, forwards_of
from tuner.model.build import ModelSpec, decoder_of, meta_model, model_config
from tuner.model.decode import greedy
from tuner.model.output_layer import OutputLayer
from tuner.model.probe import prove_route, require_isolation
from tuner.model.root import CausalLM
from tuner.model.row_layout import Route, route_of

SMALL = {**TOKENS, "hidden_size": 32}
BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "bloom": transformers.BloomConfig(**SMALL, n_layer=2, n_head=4),
    "bart": transformers.BartConfig(**TOKENS, **BART, **NO_DROPOUT, pad_token_id=0, max_position_embeddings=64),
    "mamba": transformers.MambaConfig(**SMALL, state_size=4, num_hidden_layers=2),
    "rwkv": transformers.RwkvConfig(**SMALL, attention_hidden_size=32, num_hidden_layers=2),
    "openai-gpt": transformers.OpenAIGPTConfig(
        **TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ),
    "llama": tiny_config("llama"),
    "gpt-neo": transformers.GPTNeoConfig(
        **TOKENS, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=24, window_size=8,
        attention_types=[[["global", "local"], 1]], attention_dropout=0.0, embed_dropout=0.0, resid_dropout=0.0,
    ),
}
CALLED = ("mamba", "llama")
"""Those that are taken document by document in each run of the tests: it is the class's own forward."""
WHY = {"bart": "numbers tokens by their place in the row", "bloom": "has attention of its own"}


def root_of(kind: str, directory: Path) -> CausalLM:
    """A model whose logits spread, as training builds it."""
    root = drawn_root(CONFIGS[kind], directory)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in root.named_parameters():
            if parameter.ndim == 2 and not name.endswith("A_log"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return root


def plainly(directory: Path, root: CausalLM) -> CausalLM:
    """The same numbers in the model as transformers alone loads it, which computes a document at a time."""
    root.model.save_pretrained(directory / "saved")
    with attention.withdrawn():
        return CausalLM(transformers.AutoModelForCausalLM.from_pretrained(directory / "saved"))


def gradients(root: CausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in root.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        pytest.param(kind, route, marks=pytest.mark.slow if route == "calls" and kind not in CALLED else ())
        for kind in CONFIGS
        for route in ("batch", "calls")
    ],
)
def test_documents_apart_are_those_that_the_plain_model_computes_alone(kind: str, route: Route, tmp_path: Path) -> None:
    root = root_of(kind, tmp_path)
    plain = plainly(tmp_path, root)
    root.layout.set_route(route)
    for lengths in ((5, 9, 1, 8), (3, 20, 12, 2), (7,)):
        ids = torch.randint(3, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(sum(lengths)))
        inputs = packed_inputs(ids, lengths)
        everywhere = torch.arange(len(ids))
        parts = [plain.model(input_ids=part[None], use_cache=False) for part in ids.split(list(lengths))]
        expected = torch.cat([part.logits[0] for part in parts])
        assert relative(root.logits(ids, inputs["position_ids"], lengths, everywhere), expected) < 1e-6
        for each in (root, plain):
            each.zero_grad()
        root(document_lengths=lengths, **inputs).backward()
        head = plain.model.get_output_embeddings()
        decoder = decoder_of(plain.model)
        hidden = [decoder(input_ids=part[None], use_cache=False).last_hidden_state[0] for part in ids.split([*lengths])]
        layer = OutputLayer(head.weight, getattr(head, "bias", None))
        layer.cross_entropy(torch.cat(hidden)[inputs["positions"]], inputs["targets"]).backward()
        found, wanted = gradients(root), gradients(plain)
        assert found.keys() == wanted.keys()
        whole = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
        assert max(float((found[name] - wanted[name]).norm() / whole) for name in wanted) < 2e-6


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30), bounds=st.lists(st.integers(1, 60), max_size=2))
def test_every_document_is_in_one_forward_and_little_is_filled_up(lengths: list[int], bounds: list[int]) -> None:
    for chosen in ([], bounds):
        forwards = forwards_of(lengths, "batch", chosen)
        assert sorted(place for forward in forwards for place in forward) == list(range(len(lengths)))
        assert computed_tokens(lengths, forwards) <= COMPUTED_AT_MOST * sum(lengths)
        for forward in forwards:
            own = [lengths[place] for place in forward]
            assert own == sorted(own, reverse=True)
            assert not any(own[-1] <= bound < own[0] for bound in chosen)
    assert [len(forward) for forward in forwards_of(lengths, "calls")] == [1] * len(lengths)


def test_forwards_are_few() -> None:
    assert [len(forward) for forward in forwards_of([10] * 40, "batch")] == [40]
    assert len(forwards_of([1000, 500, *[60] * 9, 8], "batch")) == 2
    assert len(forwards_of([2048, 1], "batch")) == 2


@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - {"mamba", "rwkv", "gpt-neo"}))
def test_the_structure_tells_the_route_and_the_probe_proves_it(kind: str, tmp_path: Path) -> None:
    root = root_of(kind, tmp_path)
    route, why = route_of(meta_model(model_config(ModelSpec(str(tmp_path))), torch.float32))
    assert (route, why is None) == (("flat", True) if kind == "llama" else ("batch", False))
    assert WHY.get(kind, "") in str(why)
    if kind != "llama":
        with pytest.raises(RecipeError, match="cannot be trained on packed rows"):
            require_isolation(root, VOCAB)
        assert prove_route(root, VOCAB, True, 64) is not None
    assert root.layout.route == route
    assert prove_route(root, VOCAB, True, 64) is None
    assert root.layout.route == route


def test_a_mask_as_long_as_the_positions_is_for_one_document(tmp_path: Path) -> None:
    """A probe's rows are shorter than it: only the structure tells that longer ones end in torch's error."""
    root = root_of("gpt-neo", tmp_path)
    route, why = route_of(meta_model(model_config(ModelSpec(str(tmp_path))), torch.float32))
    assert (route, why) == (
        "batch", "GPTNeoForCausalLM masks by a table of its positions, which rows end to end are longer than"
    )  # fmt: skip
    lengths, ids = (20, 24, 8), torch.arange(52) % VOCAB
    positions = torch.cat([torch.arange(length) for length in lengths])
    with pytest.raises(RuntimeError, match="must match the size"):
        root.logits(ids, positions, lengths, torch.arange(52))
    root.layout.set_route(route)
    assert prove_route(root, VOCAB, True, 24) is None
    assert root.logits(ids, positions, lengths, torch.arange(52)).isfinite().all()


def test_what_a_batch_would_change_is_computed_one_document_at_a_time(tmp_path: Path) -> None:
    sizes = {"attention_head_size": 8, "num_attention_heads": 4, "feed_forward_size": 32, "num_buckets": 2}
    chunks = {"lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8, "axial_pos_embds": False, "hash_seed": 1}
    config = transformers.ReformerConfig(**SMALL, **sizes, **chunks, is_decoder=True, attn_layers=["local", "lsh"])
    root = drawn_root(config, tmp_path)
    route, why = route_of(meta_model(model_config(ModelSpec(str(tmp_path))), torch.float32))
    assert (route, why) == ("calls", "ReformerModelWithLMHead sorts the tokens of a sequence to attend")
    root.layout.set_route(route)
    assert prove_route(root, VOCAB, True, 64) is None


def test_a_batch_whose_documents_meet_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_of("bloom", tmp_path)
    own = root._decoded

    def meeting(ids: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
        hidden = own(ids, counted)
        return hidden + hidden.mean(0) - hidden[0]  # nothing where there is one

    monkeypatch.setattr(root, "_decoded", meeting)
    assert prove_route(root, VOCAB, True, 64) is not None
    assert root.layout.route == "calls"


def test_what_our_attention_does_not_compute_is_the_classes_own(tmp_path: Path) -> None:
    root = drawn_root(tiny_config("llama"), tmp_path)
    for layer in root.model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "cache": torch.zeros(4)}), with_kwargs=True
        )
    assert "cache" in str(prove_route(root, VOCAB, False, 64))
    assert root.layout.route == "batch"
    assert root.model.config._attn_implementation == "sdpa"
    assert not root.layout.takes_documents


def test_answers_are_those_of_the_plain_model(tmp_path: Path) -> None:
    root = root_of("bart", tmp_path)
    plain = plainly(tmp_path, root).model
    plain.generation_config.forced_eos_token_id = None
    root.layout.set_route("batch")
    root.eval()
    prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]]
    answers = greedy(root, prompts, (), [5] * 3, torch.device("cpu"))
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = plain.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, eos_token_id=None)
        assert answer == whole[0, len(prompt) :].tolist()
