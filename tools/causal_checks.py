"""What the campaign of causal types checks of one type, and what it says of each."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.fixtures.processes import run_ranks
from tools.causal_cases import quiet
from tools.causal_faults import EXPERT, swap_experts
from tools.causal_plain import PlainLoop
from tools.causal_rows import STEPS
from tools.causal_training import ADAPTER, NEW_TOKENS, PROMPTS, Mode, Training
from tuner.errors import RecipeError, TunerError
from tuner.model.attention import withdrawn
from tuner.runtime.dist import RankInfo

ALLOWED = 1e-5
"""Relative, of losses and gradients; of logits, of the largest."""
MOVED_ALLOWED = 1e-6
LOOSER = 100
"""How much further off an export may be from the plain loop: AdamW steps as far where a gradient is rounding."""
SHORT = 3
"""Steps of what differs from the others in how it is computed alone."""
MODES = {
    "packed": Mode("packed"), "single": Mode("single"), "several": Mode("several", 1), "lora": Mode("", keys=ADAPTER),
    "full": Mode("", SHORT, {"train.gradient_checkpointing": "full"}),
    "selective": Mode("", SHORT, {"train.gradient_checkpointing": "selective"}),
    "torch": Mode("", SHORT, {"model.kernels": "torch"}),
}
"""Without a layout: packed where that was equal, else single."""
BAD = ("wrong", "crashed", "unnamed")


@dataclass
class Outcome:
    """Of one type in one check: its verdict, the reason, and the largest relative differences found."""

    verdict: str
    reason: str = ""
    loss: float | None = None
    """Of the steps."""
    gradients: float | None = None
    worst: float | None = None
    """Of the gradient of one tensor; one of less than a hundredth of the whole is held to that hundredth."""
    moved: float | None = None
    logits: float | None = None
    """Of an export, from the trained model's."""


@dataclass
class Finding:
    """Of one type: why transformers itself cannot run it, or what became of each check."""

    type: str
    impossible: str = ""
    modes: dict[str, Outcome] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    """Parameters that no gradient reaches in the plain model: what the tiny config does not try."""
    route: str = "flat"
    """How the documents of packed rows go through the model."""
    liger: bool = False
    """Whether liger has kernels for it."""
    draws: bool = False
    """Whether it draws random numbers in training: its packed trainings are compared in evaluation mode."""
    seconds: float = 0.0


class Subject:
    """One type's model, its references, each trained once, and its trainings."""

    def __init__(self, directory: Path, draws: bool, fault: str = "", steps: int = STEPS) -> None:
        self.directory, self.draws, self.fault, self.steps = directory, draws, fault, steps
        self.trained: dict[str, Training] = {}
        """By mode, those that were equal."""
        self._references: dict[tuple[bool, bool], PlainLoop] = {}

    @property
    def layout(self) -> str:
        """In which way the type is trained: packed where that was equal, else single."""
        return "packed" if "packed" in self.trained else "single"

    @property
    def best(self) -> Training | None:
        """A training that was equal, packed before single."""
        return self.trained.get("packed") or self.trained.get("single")

    def reference(self, held: bool = False, firsts: Mapping[str, torch.Tensor] | None = None) -> PlainLoop:
        """The plain loop, of adapters where their first matrices are given; ``held`` in evaluation mode."""
        key = (held, firsts is not None)
        if key not in self._references:
            self._references[key] = PlainLoop(self.directory, firsts, held).train(self.steps)
        return self._references[key]

    def held(self, layout: str) -> bool:
        """Whether a training in that layout stays in evaluation mode."""
        return self.draws and layout != "single"

    def compare(self, name: str) -> Outcome:
        """Train in a mode and compare."""
        mode = MODES[name] if MODES[name].layout else replace(MODES[name], layout=self.layout)
        mode, held = replace(mode, steps=min(mode.steps, self.steps)), self.held(mode.layout)

        def train() -> Outcome:
            training = Training(self.directory, mode, held).train(self.fault)
            plain = self.reference(held, training.firsts if name == "lora" else None)
            outcome = difference(training, plain)
            if outcome.verdict == "equal":
                self.trained[name] = training
            return outcome

        return tried(train)


def difference(training: Training, plain: PlainLoop) -> Outcome:
    """How far a training is from its reference."""
    found, wanted = training.gradients, plain.gradients
    whole = sum(float(g.norm()) ** 2 for g in wanted.values()) ** 0.5
    squares, worst, zero = 0.0, 0.0, torch.zeros(())
    for name in sorted(wanted.keys() | found.keys()):
        expected = wanted.get(name, zero)
        apart = float((found.get(name, zero) - expected).norm())
        squares += apart**2
        worst = max(worst, apart / max(float(expected.norm()), whole / 100))
    losses = max(abs(a - b) / abs(b) for a, b in zip(training.losses, plain.losses, strict=False))
    figures = (losses, squares**0.5 / whole, worst)
    moved = training.moved_by_later()
    right = all(figure <= ALLOWED for figure in figures) and moved <= MOVED_ALLOWED
    return Outcome("equal" if right else "wrong", "", *figures, moved)


def tried(check: Callable[[], Outcome]) -> Outcome:
    """What a check found, or how it ended: refused by the recipe's own errors, crashed by any other."""
    try:
        return check()
    except RecipeError as error:
        return Outcome(named("refused", error.message), error.message)
    except TunerError as error:
        return Outcome("crashed", f"{type(error).__name__}: {error.message}")
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises is a finding
        return Outcome("crashed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def named(verdict: str, reason: str) -> str:
    """A refusal is unnamed where it gives an exception of the model's code and no property of the model."""
    return "unnamed" if verdict == "refused" and re.search(r"\b[A-Z]\w*Error: ", reason) else verdict


def processes(subject: Subject) -> Outcome:
    """Two processes over gloo that hold a half of the model each, against the plain loop.

    Each draws random numbers of its own, so a model that does stays in evaluation mode.
    """
    if subject.best is None:
        return Outcome("untried", "it is not trained by one process")
    mode, held = Mode(subject.layout, min(SHORT, subject.steps)), subject.held("packed")
    said = subject.directory / "said.json"

    def work(rank: int) -> None:
        with quiet():
            training = Training(subject.directory, mode, held, RankInfo(rank, 2, rank, 2)).train(subject.fault)
        if rank == 0:
            said.write_text(json.dumps(training.losses))

    def spread() -> Outcome:
        codes = run_ranks(2, subject.directory, work)
        if any(codes):
            return Outcome("crashed", f"the processes ended with {codes}")
        pairs = zip(json.loads(said.read_text()), subject.reference(held).losses, strict=False)
        losses = max(abs(a - b) / abs(b) for a, b in pairs)
        return Outcome("equal" if losses <= ALLOWED else "wrong", "", losses)

    return tried(spread)


def answers(subject: Subject) -> Outcome:
    """Greedy answers of the trained model against those that `generate` of the plain one gives with its weights.

    Where `generate` does not give what the plain model's own forward over all tokens does (it numbers RoBERTa's from 0,
    and appends a mask to XLNet's), the answers are held to that forward.
    """
    if subject.best is None:
        return Outcome("untried", "it is not trained")
    plain: Any = subject.reference(subject.held(subject.layout)).model
    plain.train(False)
    try:
        with withdrawn():
            forward = [continued(plain, prompt) for prompt in PROMPTS]
            wanted = [generated(plain, prompt) for prompt in PROMPTS]
    except Exception as error:  # noqa: BLE001 - whatever transformers raises is the reason
        return Outcome("untried", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    training = subject.best

    def decode() -> Outcome:
        found = training.answers()
        reason = "" if found == wanted else f"{found} for {wanted}"
        if found == forward and wanted not in (found, forward):
            reason = "held to the model's forward over all tokens, of which generate gives another continuation"
        return Outcome("equal" if found in (wanted, forward) else "wrong", reason)

    return tried(decode)


@torch.no_grad()
def continued(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """The plain model's greedy continuation by its forward over all tokens so far, without a cache."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def generated(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """The plain model's greedy continuation."""
    given = torch.tensor([prompt])
    settings = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=NEW_TOKENS)
    model.generation_config = GenerationConfig()  # which may force a last token
    made = model.generate(given, attention_mask=torch.ones_like(given), generation_config=settings)
    return [int(token) for token in made[0, len(prompt) :]]


def export(subject: Subject) -> Outcome:
    """The exports of the full training and of the adapter's, loaded by transformers alone, against what was trained."""
    if subject.best is None:
        return Outcome("untried", "it is not trained")
    found = [(subject.best, subject.reference(subject.held(subject.layout)))]
    if "lora" in subject.trained:
        adapter = subject.trained["lora"]
        found.append((adapter, subject.reference(subject.held(subject.layout), adapter.firsts)))

    def written() -> Outcome:
        worst = 0.0
        for number, (training, plain) in enumerate(found):
            directory = training.export(subject.directory / f"exported-{number}")
            if subject.fault == EXPERT:
                swap_experts(directory)
            with withdrawn(), torch.no_grad():
                model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
                loaded = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in plain.inputs()]
            worst = max(worst, apart(loaded, training.logits()), apart(loaded, plain.logits()) / LOOSER)
        return Outcome("equal" if worst <= ALLOWED else "wrong", logits=worst)

    return tried(written)


def apart(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference of logits, as a share of the largest; infinite for other shapes."""
    if [one.shape for one in found] != [one.shape for one in wanted]:
        return float("inf")
    pairs = list(zip(found, wanted, strict=True))
    return max(float((a - b).abs().max()) for a, b in pairs) / max(float(b.abs().max()) for _, b in pairs)
