"""The steps of one process, and those of a layout, compared: what is compared, and where they part first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from tuner.checkpoint.load import content_sha256, load_into, read_tensors
from tuner.checkpoint.manifest import step_name
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.config.methods import Examples, head_of
from tuner.config.recipe import Recipe
from tuner.data.batches import Batch, StepBatches, collate, step_of
from tuner.data.building.spec import prepare_spec
from tuner.data.prepared import Row
from tuner.model.build import model_config
from tuner.model.probe import IsolationReport, require_isolation
from tuner.parallel.health import Copy, first_difference, sums_of
from tuner.parallel.layouts import whole
from tuner.parallel.mesh import Mesh
from tuner.prove import compare
from tuner.prove.layouts import ALONE, Layout
from tuner.prove.twin import LONGEST, ROWS, Twin
from tuner.rundir.layout import MODEL_PREFIX
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import read_json, write_json
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import build_train_state, run_tensors
from tuner.setup.model import load_model
from tuner.setup.resolve import model_spec, resolve, takes_several
from tuner.setup.settled import without_prediction
from tuner.setup.specs import assembly_spec, step_config_of
from tuner.train.methods.method import Method
from tuner.train.step import TrainState, forward_backward, optimizer_step

SPREAD = 0.1
"""Standard deviation of weights, and of what is added to those of norms and biases: none is 0 or 1."""
_SEED = 23


@dataclass(frozen=True)
class Setting:
    """What every process of a proof knows: the recipe, how many steps, and where one process left its own."""

    twin: Twin
    steps: int
    place: Path

    @property
    def half(self) -> int:
        """The step whose checkpoint is resumed from."""
        return self.steps // 2

    @property
    def numbers(self) -> Path:
        """Losses, norms and hashes of one process."""
        return self.place / "plain.json"

    @property
    def traces(self) -> Path:
        """What its modules gave in the first step."""
        return self.place / "traces"

    def checkpoint(self, step: int) -> Path:
        """A checkpoint of one process."""
        return self.place / "plain" / step_name(step)


@dataclass(frozen=True)
class Training:
    """A model that trains: its state, its rows, and the micro-batches of a step."""

    state: TrainState
    rows: ProofRows

    def steps(self, first: int, last: int) -> tuple[list[float], list[float]]:
        """Take the steps from one to before another at the full rate; their losses and gradient norms."""
        mesh, losses, norms = self.state.step_config.mesh, [], []
        for index in range(first, last):
            taken = optimizer_step(self.state, index, self.rows.step(index, self.state.method, mesh), 1.0).read()
            losses.append(taken.loss)
            norms.append(taken.grad_norm)
        return losses, norms

    def gradients(self, batches: StepBatches) -> dict[str, torch.Tensor]:
        """The gradients of a step that is not taken, whole, by the parameter's name; nothing is left of them."""
        forward_backward(self.state, 0, batches)
        found = {name: whole(gradient).clone() for name, gradient in self.state.gradients().items()}
        self.state.optimizer.zero_grad()
        return found

    def save(self, place: Path, step: int) -> Path:
        """Commit a checkpoint of it. Collective."""
        return save(CheckpointDir(place, "prove"), step, run_tensors(self.state), {}, {})

    def load(self, path: Path, prefix: str = "") -> None:
        """Take over a checkpoint, or its tensors whose names begin so. Collective."""
        named = run_tensors(self.state).items()
        load_into(open_checkpoint(path), {n: tensor for n, tensor in named if n.startswith(prefix)}, prefix)


def build(setting: Setting, layout: Layout, rank: int) -> Training:
    """Model, optimizer and rows, as a training builds them. Collective where there are several processes."""
    rank_info = layout.rank_info(rank)
    resolved = setting.twin.resolved(layout)
    step_config = step_config_of(resolved, torch.device("cpu"), rank_info)
    root = load_model(resolved, assembly_spec(resolved), step_config.mesh, step_config.device).root
    state = build_train_state(resolved, root, step_config)
    vocabulary = resolved.config.get_text_config().vocab_size
    recipe = setting.twin.recipe
    return Training(state, ProofRows(recipe.method.examples, vocabulary, setting.twin.accumulate, recipe.seed))


def train_plain(setting: Setting) -> None:
    """Give the small model its weights, train it in this process alone, and leave what others are compared with."""
    write_weights(setting)
    training = build(setting, ALONE, 0)
    _spread_adapters(setting, training.state)
    training.save(setting.place / "plain", 0)
    with compare.traced(training.state.root.model) as trace:
        gradients = training.gradients(training.rows.each(0, training.state.method))
    compare.write_trace(trace, setting.traces)
    save(CheckpointDir(setting.place / "gradients", "prove"), 1, gradients, {}, {})
    losses, norms = training.steps(0, setting.half)
    half = training.save(setting.place / "plain", setting.half)
    more, further = training.steps(setting.half, setting.steps)
    training.save(setting.place / "plain", setting.steps)
    sha256 = content_sha256(open_checkpoint(half))
    write_json(setting.numbers, {"losses": losses + more, "norms": norms + further, "half": sha256})


def train_layout(setting: Setting, layout: Layout, rank: int, place: Path) -> tuple[dict[str, float], str | None]:
    """Train in a process of a layout: figures by what is compared, and where it parts first from one process.

    A checkpoint is written to ``place``. Collective; the same answer on every rank. Raises RecipeError where the
    layout is refused.
    """
    training = build(setting, layout, rank)
    if setting.twin.recipe.adapter.kind != "none":
        training.load(setting.checkpoint(0), MODEL_PREFIX)
    return _Comparison(setting, training, place / layout.name, Collective(gloo_group())).compared()


class _Comparison:
    """A training under a layout, compared with that of one process. Every method is collective."""

    def __init__(self, setting: Setting, training: Training, saved: Path, ranks: Collective) -> None:
        self._setting, self._training, self._saved, self._ranks = setting, training, saved, ranks
        self._plain: dict[str, Any] = read_json(setting.numbers)

    def compared(self) -> tuple[dict[str, float], str | None]:
        """What was found, and the first cause of what is unequal in the order of a step."""
        setting, training, plain = self._setting, self._training, self._plain
        start = self._other_copy()
        gradient, worst_gradient = self._gradients()
        losses, norms = training.steps(0, setting.steps)
        end = self._other_copy()
        weights, worst_weight = self._weights()
        is_saved, resumed = self._resumed()
        figures = {
            "loss": compare.furthest(losses, plain["losses"]), "grad_norm": compare.furthest(norms, plain["norms"]),
            "gradients": gradient, "weights": weights, "copies": float((start or end) is not None),
            "saved": float(not is_saved), "resumed": compare.furthest(resumed, plain["losses"][setting.half :]),
        }
        if not (wrong := compare.unequal(figures)):
            return figures, None
        words = {
            "gradients": f"gradient of {worst_gradient}",
            "copies": str(end),
            "grad_norm": compare.first_step("gradient norm", norms, plain["norms"], compare.LIMITS["grad_norm"]),
            "loss": compare.first_step("loss", losses, plain["losses"], compare.LIMITS["loss"]),
            "weights": f"weights after step {setting.steps}: {worst_weight}",
            "saved": "the bytes of a checkpoint of the same values",
            "resumed": f"the losses after a resume from the checkpoint of one process at step {setting.half}",
        }
        cause = start or self._place() or next(said for name, said in words.items() if name in wrong)
        return figures, cause

    def _resumed(self) -> tuple[bool, list[float]]:
        """Whether the state of one process in the middle is saved as it was read, and the losses of the steps from
        there."""
        setting, training = self._setting, self._training
        training.load(setting.checkpoint(setting.half))
        training.state.optimizer.set_step_count(setting.half)
        saved = training.save(self._saved, setting.half)
        is_saved = self._ranks.on_rank0(lambda: content_sha256(open_checkpoint(saved)) == self._plain["half"])
        return is_saved, training.steps(setting.half, setting.steps)[0]

    def _other_copy(self) -> str | None:
        """Where a process has another copy of a weight or of a state than most."""
        tensors = run_tensors(self._training.state)
        copies = [Copy.of(name, tensors[name], self._ranks.size) for name in sorted(tensors)]
        found = first_difference(copies, sums_of(copies), self._ranks)
        return None if found is None else str(found)

    def _gradients(self) -> tuple[float, str]:
        """How far the gradients of the first step are off at most, and the first one that is, in words."""
        state, mesh = self._training.state, self._training.state.step_config.mesh
        found = self._training.gradients(self._training.rows.step(0, state.method, mesh))
        wanted, norm = _read_gradients(self._setting.place / "gradients")
        figures, first = {}, ""
        for name in state.parameters:
            other = wanted.get(name, torch.zeros(()))
            own = found.get(name, torch.zeros_like(other))
            floor = compare.GRADIENT_FLOOR * norm
            is_alike = own.shape == other.shape or not other.ndim
            figures[name] = compare.apart(own, other, floor) if is_alike else math.inf
            if not first and compare.unequal({"gradients": figures[name]}):
                first = f"{name}: {figures[name]:.1e} apart on rank {self._ranks.rank}{compare.times(own, other)}"
        return self._worst(figures, first)

    def _weights(self) -> tuple[float, str]:
        """How far the weights after all steps are off at most, and the first one that is, in words."""
        setting, parameters = self._setting, self._training.state.parameters
        last = open_checkpoint(setting.checkpoint(setting.steps))
        gradients, norm = _read_gradients(setting.place / "gradients")
        way = 2 * float(setting.twin.recipe.optimizer.lr) * setting.steps
        figures, first = {}, ""
        for name, wanted in read_tensors(last, [f"{MODEL_PREFIX}{name}" for name in parameters]):
            own = name.removeprefix(MODEL_PREFIX)
            found = whole(parameters[own].detach()).clone()
            if own in gradients:
                found = compare.without_rounding(found, wanted, gradients[own], norm, way)
            figures[own] = compare.apart(found, wanted, compare.WEIGHT_FLOOR * wanted.numel() ** 0.5)
            if not first and compare.unequal({"weights": figures[own]}):
                first = f"{own}: {figures[own]:.1e} apart on rank {self._ranks.rank}"
        return self._worst(figures, first)

    def _worst(self, figures: Mapping[str, float], first: str) -> tuple[float, str]:
        """The worst figure of any process, and the first words of one."""
        each = self._ranks.on_all_ranks(lambda: (max(figures.values(), default=0.0), first))
        return max(figure for figure, _ in each), next((words for _, words in each if words), "")

    def _place(self) -> str | None:
        """The first module whose output or gradient is another one, of any process, from the same weights."""
        training, mesh = self._training, self._training.state.step_config.mesh
        training.load(self._setting.checkpoint(0), MODEL_PREFIX)
        with compare.traced(training.state.root.model) as trace:
            training.gradients(training.rows.step(0, training.state.method, mesh))
        micro = training.rows.micro(mesh)
        rank, share = self._ranks.rank, (mesh.weight_rank % mesh.sequence, mesh.sequence)
        own = self._ranks.on_all_ranks(lambda: compare.first_place(trace, self._setting.traces, micro, share, rank))
        found = [place for place in own if place is not None]
        return str(min(found, key=lambda place: (place.kind != "output", place.order))) if found else None


def write_weights(setting: Setting) -> None:
    """Draw the weights of the small model and write them next to its config, as a model's files."""
    recipe = setting.twin.recipe
    config = model_config(model_spec(recipe, range(0)))
    score = head_of(recipe.method) == "score"
    auto: Any = AutoModelForSequenceClassification if score else AutoModelForCausalLM
    torch.manual_seed(_SEED)
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            drawn = torch.randn(parameter.shape, generator=generator) * SPREAD
            parameter.copy_(drawn if parameter.ndim > 1 else parameter + drawn)
    model.save_pretrained(recipe.model.name_or_path)


@torch.no_grad()
def _spread_adapters(setting: Setting, state: TrainState) -> None:
    """Have no matrix of an adapter be zero: the gradients of others would be."""
    if setting.twin.recipe.adapter.kind == "none":
        return
    generator = torch.Generator().manual_seed(_SEED)
    for _, parameter in sorted(state.parameters.items()):
        parameter.add_(torch.randn(parameter.shape, generator=generator) * SPREAD)


def _read_gradients(directory: Path) -> tuple[dict[str, torch.Tensor], float]:
    """The gradients of one process by name, and the norm of all."""
    found = dict(read_tensors(open_checkpoint(directory / step_name(1))))
    return found, math.sqrt(sum(float(one.double().square().sum()) for one in found.values()))


def prove_weights(recipe: Recipe) -> tuple[IsolationReport, str]:
    """How far documents of a row move each other, and are from the model as transformers loads it; and their route.

    The whole model, in float32 on the CPU, a module at a time; what a launch finds in the cache is not asked. Raises
    RecipeError where the model cannot be trained.
    """
    spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
    here = recipe.model_copy(update={"train": recipe.train.model_copy(update={"device": "cpu"})})
    resolved = resolve(without_prediction(here), spec.max_length, RankInfo(), spec.tokenizer.new_ids)
    root = load_model(resolved, assembly_spec(resolved).of_weight_source(), Mesh(), torch.device("cpu")).root
    vocab_size, longest = resolved.config.get_text_config().vocab_size, resolved.max_length
    return require_isolation(root, vocab_size, takes_several(recipe), longest, every_layer=True), root.layout.route


STEPS_APART = 4
"""Steps after which rows come again, so that a loss falls."""
_FIRST_ID = 3
"""Below it are special tokens."""
_UNTRAINED = 4
"""Tokens at the beginning of a document that are not trained, as those of a prompt."""


@dataclass(frozen=True)
class ProofRows:
    """Where the rows of a proof come from: ids below ``vocabulary``, documents as the method has them."""

    examples: Examples
    vocabulary: int
    accumulate: int
    seed: int

    def step(self, index: int, method: Method, mesh: Mesh) -> StepBatches:
        """What one process of a mesh computes in a step: its part of the rows, with the counts of all of them."""
        return self.of(index, method, self.micro(mesh))

    def micro(self, mesh: Mesh) -> list[range]:
        """The numbers of the rows in each micro-batch of one process."""
        per_process = ROWS // mesh.data_size
        first, count = mesh.data_rank * per_process, min(self.accumulate, per_process)
        size = per_process // count
        return [range(start, start + size) for start in range(first, first + per_process, size)]

    def each(self, index: int, method: Method) -> StepBatches:
        """A step in one process with a micro-batch for each row."""
        return self.of(index, method, [range(number, number + 1) for number in range(ROWS)])

    def of(self, index: int, method: Method, micro: list[range]) -> StepBatches:
        """A step with these micro-batches, by the numbers of their rows, and the counts of all rows."""
        rows = [self._row(index % STEPS_APART, number) for number in range(ROWS)]
        whole = step_of([method.made_up(collate([row])) for row in rows], method.mismatched)
        own: list[Batch] = [method.made_up(collate([rows[number] for number in some])) for some in micro]
        return replace(whole, micro=own, mismatched=own if method.mismatched else [])

    def _row(self, step: int, number: int) -> Row:
        """One row: the first of a step is a single document or pair, others hold several of them."""
        draw = np.random.default_rng((self.seed, step, number))
        length = LONGEST - number % 5
        lengths = self._lengths(draw, length, alone=number == 0)
        ids = draw.integers(_FIRST_ID, self.vocabulary, sum(lengths), dtype=np.int64)
        trained = np.ones(len(ids), dtype=np.bool_)
        if self.examples.kind != "pretrain":
            for start in np.cumsum([0, *lengths[:-1]]):
                trained[start : start + _UNTRAINED] = False
        documents = np.arange(len(lengths), dtype=np.int64)
        columns = {"label": (documents + number) % 2 == 0} if self.examples.kind == "unpaired" else {}
        return Row(ids, trained, np.array(lengths, dtype=np.int32), documents + number * LONGEST, columns)

    def _lengths(self, draw: np.random.Generator, length: int, alone: bool) -> list[int]:
        """Lengths of documents that fill a row; of pairs, two of each."""
        per_example = self.examples.documents
        shortest = 2 * _UNTRAINED
        count = per_example if alone else per_example * (2 if per_example > 1 else int(draw.integers(2, 5)))
        cuts = draw.dirichlet(np.full(count, 2.0)) * (length - shortest * count)
        lengths = [shortest + int(cut) for cut in cuts]
        lengths[-1] += length - sum(lengths)
        return lengths
