"""Weights of experts that stay in the files: found where they lie, read by who asks, and never taken for zeros."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.fixtures.hashes import frozen_hash
from tests.model.tiny import SHAPE
from tuner.errors import DataError, RecipeError
from tuner.model import unread as module
from tuner.model.build import ModelSpec, build_model
from tuner.model.probe import require_isolation
from tuner.model.root import CausalLM
from tuner.model.stored import published
from tuner.model.unread import InFile, UnreadWeights, WeightPiece, _box, _pattern
from tuner.runtime.parts import Box
from tuner.setup import hashes
from tuner.setup.hashes import FrozenHash

LAYERS = 4
FEW = {"num_hidden_layers": LAYERS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 8}, "mixtral": {"num_local_experts": 4}, "olmoe": {},
    "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 8},
}


@pytest.fixture(params=TYPES)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return written(tmp_path, str(request.param))


def written(directory: Path, kind: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE | FEW | TYPES[kind])
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(directory, **options)
    return directory


def loaded(files: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedModel, UnreadWeights]:
    """The model with its values, and one that leaves what it can."""
    whole, unread = build_model(ModelSpec(str(files)), dtype, 0), UnreadWeights()
    return whole, build_model(ModelSpec(str(files), unread=unread), dtype, 0), unread


def left_in(model: nn.Module, unread: UnreadWeights) -> dict[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if unread.pieces(one) is not None}


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, "100 MB"), (torch.float32, "20 KB")], ids=["one file", "several files"]
)
def test_they_are_what_transformers_makes_of_the_files(
    files: Path, dtype: torch.dtype, size: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_model(ModelSpec(str(files)), torch.bfloat16, 0).save_pretrained(tmp_path / "cut", max_shard_size=size)
    whole, model, unread = loaded(tmp_path / "cut", dtype)
    left, wanted = left_in(model, unread), dict(whole.named_parameters())
    assert len(left) >= 2 * LAYERS and not caplog.records
    for name, one in model.named_parameters():
        assert (one.dtype, one.requires_grad) == (wanted[name].dtype, wanted[name].requires_grad), name
        assert torch.equal(unread.whole(one.detach()), wanted[name]), name
        assert bool(one.isnan().any()) is (name in left and ".0." not in name), name
        in_order = torch.cat([part.flatten() for part in unread.in_order(one.detach())])
        assert torch.equal(in_order, wanted[name].flatten()), name
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), whole.buffers(), strict=True))
    unread.read(model)
    assert all(torch.equal(one, wanted[name]) for name, one in model.named_parameters())
    assert model.config.to_json_string(use_diff=False) == whole.config.to_json_string(use_diff=False)
    assert not getattr(model, "is_quantized", False), "a reader is no quantiser to those who save or train"
    assert [entry.targets for entry in published(model)] == [entry.targets for entry in published(whole)]


def test_who_computes_with_unread_weights_sees_it(tmp_path: Path) -> None:
    _, model, unread = loaded(written(tmp_path, "qwen3_moe"))
    ids = torch.arange(16)[None]
    assert model(input_ids=ids).logits.isnan().any()
    unread.read(model)
    assert model(input_ids=ids).logits.isfinite().all()


def test_those_of_layers_that_do_not_run_stay_unread(tmp_path: Path) -> None:
    _, model, unread = loaded(written(tmp_path, "qwen3_moe"))
    layers = model.get_decoder().layers
    unread.read(model, {layers[1], layers[3]})
    assert {name for name, one in model.named_parameters() if one.isnan().any()} == {
        f"model.layers.{layer}.mlp.experts.{name}" for layer in (1, 3) for name in ("gate_up_proj", "down_proj")
    }


def test_the_proof_reads_what_it_runs(tmp_path: Path) -> None:
    _, model, unread = loaded(written(tmp_path, "qwen3_moe"))
    root = CausalLM(model.float())  # one that has float32 copies of them has unread ones no more
    with pytest.raises(RecipeError):
        require_isolation(root, 97)
    _, model, unread = loaded(tmp_path, torch.float32)
    seen: list[int] = []

    def read(left_out: Any) -> None:
        seen.append(len(left_out))
        unread.read(model, left_out)

    assert require_isolation(CausalLM(model), 97, read=read).is_clean
    assert seen == [LAYERS - 2], "the first and the last layer stand for all"
    assert sum(bool(one.isnan().any()) for one in model.parameters()) == 2 * (LAYERS - 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_their_hash_is_that_of_the_model_and_is_kept(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "SETTLED_NS", 0)
    files, cache = written(tmp_path / "model", "mixtral"), str(tmp_path / "cache")
    whole, model, unread = loaded(files, dtype)
    for one in (whole, model):
        one.requires_grad_(False)
        one.get_input_embeddings().requires_grad_(True)
    assert FrozenHash(model, cache, "cpu", unread)() == frozen_hash(whole)
    monkeypatch.setattr(UnreadWeights, "in_order", lambda self, tensor: pytest.fail("it is known"))
    if dtype is torch.bfloat16:
        assert FrozenHash(model, cache, "cpu", unread)() == frozen_hash(whole)
    tensors = load_file(files / "model.safetensors")
    name = next(name for name in tensors if ".2." in name and "experts.3" in name)
    tensors[name].view(-1)[-1] += 1
    save_file(tensors, files / "model.safetensors", {"format": "pt"})
    monkeypatch.undo()
    assert FrozenHash(model, cache, "cpu", unread)() == frozen_hash(whole), "another file is none that was read"
    whole, model, unread = loaded(files, dtype)
    for one in (whole, model):
        one.requires_grad_(False)
        one.get_input_embeddings().requires_grad_(True)
    assert FrozenHash(model, cache, "cpu", unread)() == frozen_hash(whole)


def test_pieces_that_are_not_what_transformers_read_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, real = written(tmp_path, "qwen3_moe"), module._pieces_of

    def swapped(*given: Any) -> Any:
        first, second, *rest = real(*given)
        return WeightPiece(first.box, second.place), WeightPiece(second.box, first.place), *rest

    monkeypatch.setattr(module, "_pieces_of", swapped)
    whole, model, unread = loaded(files)
    assert not left_in(model, unread)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("lost", ["experts.2.up_proj", "norm"])
def test_what_files_lack_is_named_as_ever(lost: str, tmp_path: Path) -> None:
    tensors = load_file(written(tmp_path, "qwen3_moe") / "model.safetensors")
    del tensors[next(name for name in tensors if lost in name and "layers.2" in name)]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    errors = []
    for unread in (None, UnreadWeights()):
        with pytest.raises(DataError) as raised:
            build_model(ModelSpec(str(tmp_path), unread=unread), torch.bfloat16, 0)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


WHOLE = torch.empty(4, 6, 5)
BOXES = {
    "all": (WHOLE, Box((0, 0, 0), (4, 6, 5), (0, 0, 0))),
    "one of the first": (WHOLE[2], Box((2, 0, 0), (1, 6, 5), (2, 0, 0))),
    "rows of one": (WHOLE[3, 2:4], Box((3, 2, 0), (1, 2, 5), (3, 2, 0))),
    "columns of all": (WHOLE[:, :, 1:3], Box((0, 0, 1), (4, 6, 2), (0, 0, 1))),
    "one row of each": (WHOLE[:, 5], Box((0, 5, 0), (4, 1, 5), (0, 5, 0))),
    "every other row": (WHOLE[:, ::2], None),
    "transposed": (WHOLE[1].t(), None),
    "memory of its own": (WHOLE.clone(), None),
}


@pytest.mark.parametrize("what", BOXES)
def test_which_elements_a_view_has(what: str) -> None:
    view, box = BOXES[what]
    assert _box(view, WHOLE) == box
    if box is not None:
        assert torch.equal(box.of(WHOLE).reshape(view.shape).isnan(), view.isnan())


def test_elements_of_a_piece() -> None:
    content = torch.arange(30.0)
    piece = WeightPiece(Box((2, 1, 0), (1, 4, 5), (2, 1, 0)), InFile("file", 8, torch.float32, (1, 4, 5)))
    view = piece.of(Box((2, 3, 1), (1, 2, 3), (0, 0, 0)), content.view(torch.uint8))
    assert view.tolist() == [[[13.0, 14.0, 15.0], [18.0, 19.0, 20.0]]] and piece.first(view) == 11


def test_names_that_are_meant() -> None:
    names = [f"layers.{layer}.experts.{expert}.up.weight" for layer in range(12) for expert in range(3)]
    stored = [*names, "layers.1.up.weight", "embed"]
    some = [name for name in names if not name.startswith("layers.0.")]
    assert _pattern(some, stored) is not None
    assert _pattern(names[:-1], stored) is None, "one expert of a layer is no layer"
    assert _pattern(["embed"], stored) is None and _pattern([], stored) is None
