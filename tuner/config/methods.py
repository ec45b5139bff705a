"""The method section of the recipe: one class for each kind, and what its examples are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from tuner.config.numbers import CadenceSpan, Real, WeightedWords, Whole
from tuner.config.section import ByKind, Durations, Options, Section, Use
from tuner.config.value_types import T, Text, Word, refuse

_METHOD_KIND = (
    "sft learns answers to prompts; pretrain every token of plain text; dpo, orpo, simpo and cpo which of two answers "
    "is preferred; kto which answers are desirable; reward scores answers, for a model that ranks them; distill a "
    "teacher's distributions; custom has a loss of your own."
)
MethodKind = Annotated[Word[T], Field(description=_METHOD_KIND)]
_TRAIN_ON = "Which tokens are learned: those of every assistant turn, of the last one, or all."
TrainOn = Annotated[Word[Literal["assistant", "last_assistant", "all"]], Field(description=_TRAIN_ON)]

Rows = Annotated[Word[Literal["sft", "pretrain"]], Field(description="Which method's records it is trained on.")]

ExampleKind = Literal["sft", "pretrain", "preference", "unpaired"]


@dataclass(frozen=True)
class Examples:
    """What a method's examples are: the documents that a record becomes, and what is trained in each of them.

    Every method's section says its own by the property ``examples``.
    """

    kind: ExampleKind
    """sft: a record is one document, of turns or of a prompt and its completion; pretrain: one, of plain text;
    preference: two, the prompt with the chosen answer, then with the rejected one; unpaired: one, with a label."""
    train_on: Literal["assistant", "last_assistant", "all"] = "all"
    """Which tokens of a document are trained."""

    @property
    def too_long(self) -> Literal["split", "drop"]:
        """What ``data.too_long: auto`` does with a document that is longer than a row."""
        return "split" if self.kind == "pretrain" else "drop"

    @property
    def documents(self) -> int:
        """Documents of an example: they stand next to each other, in one row."""
        return 2 if self.kind == "preference" else 1

    @property
    def unit(self) -> str:
        """What an example is called where examples are counted."""
        return "pair" if self.kind == "preference" else "document"

    @property
    def compares(self) -> bool:
        """Whether it is learned which answers are preferred or wanted."""
        return self.kind in {"preference", "unpaired"}


@dataclass(frozen=True)
class LoggedFigure:
    """A mean over tokens, documents or pairs that a method measures next to its loss, in steps and in evaluations.

    Every method's section says its own by the property ``figures``: names in the order of their importance.
    """

    better: Literal["higher", "lower"]
    """Which of two values is the better one: ``checkpoint.keep_best`` goes by it."""
    heading: str
    """Its name where there is little room: at most 7 letters."""


_LOGGED = json.loads(Path(__file__).with_name("logged_figures.json").read_text(encoding="utf-8"))


def _logged(*names: str) -> Mapping[str, LoggedFigure]:
    """Figures of these names, by `logged_figures.json`: which value is the better one, and the heading."""
    return {name: LoggedFigure(**_LOGGED[name]) for name in names}


_REWARDS = _logged("accuracy", "margin", "reward_chosen", "reward_rejected")
"""What every method over pairs logs: how often the chosen answer's reward is the higher one and by how much, and the
rewards."""
_PAIRS = _logged(*_REWARDS, "logp_chosen", "logp_rejected")
"""With the log-probabilities of the answers."""


class MethodSection(Section):
    """What every method's section is made of, besides ``kind`` and ``examples``."""

    lr: ClassVar[float | None] = None
    """What ``optimizer.lr: auto`` is where all weights are trained, with an adapter ten times that; None: by size."""

    @property
    def figures(self) -> Mapping[str, LoggedFigure]:
        """None: the loss says it all."""
        return {}


class SftMethod(MethodSection):
    """Supervised fine-tuning on conversations or prompt and completion."""

    kind: MethodKind[Literal["sft"]] = "sft"
    train_on: TrainOn = "assistant"
    reduction: Word[Literal["token", "document", "sqrt"]] = "token"
    """Mean of the losses over a global batch: of tokens; of documents' means; or by square roots of their lengths."""

    @property
    def examples(self) -> Examples:
        """One document each, of turns or of a prompt and its completion."""
        return Examples("sft", self.train_on)


class PretrainMethod(MethodSection):
    """Next-token prediction on plain text."""

    kind: MethodKind[Literal["pretrain"]] = "pretrain"
    examples: ClassVar[Examples] = Examples("pretrain")


_BETA = (
    "Scale of rewards: for dpo and kto of log-ratios to the reference, to which a larger one holds the policy more "
    "strongly; for cpo of log-probabilities, for simpo of average ones; for orpo the weight of its odds ratio."
)
Beta = Annotated[float, Real(gt=0), Field(description=_BETA)]
_REFERENCE = (
    "Log-probabilities of the reference: columns computed once, before the first step, and kept with the prepared "
    "data, or adapter_off, computed in each step without the adapter; auto: adapter_off where there is an adapter."
)
Reference = Annotated[Word[Literal["auto", "columns", "adapter_off"]], Field(description=_REFERENCE)]
_SFT_WEIGHT = "Weight of the cross-entropy of chosen answers, per token, that is added to the loss; 0 adds none."
SftWeight = Annotated[float, Real(ge=0), Field(description=_SFT_WEIGHT)]
_MARGIN = "By how much the chosen answer has to win: none, or what each row says by its margin or its two scores."
Margin = Annotated[Word[Literal["none", "rows"]], Field(description=_MARGIN)]
DpoLoss = Literal["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "apo_zero", "apo_down", "sppo", "nca", "bco"]


class PairSection(MethodSection):
    """What the sections of methods over pairs of answers have in common.

    An example is two documents: the prompt with either answer, of which the answer is trained.
    """

    examples: ClassVar[Examples] = Examples("preference", "last_assistant")
    measured: ClassVar[Mapping[str, LoggedFigure]] = _PAIRS
    """What is logged besides the terms of the loss."""

    @property
    def losses(self) -> tuple[str, ...]:
        """The terms of the loss by name: of preferences and, with a weight, `sft`; a single one is named loss."""
        return ("preference", "sft") if getattr(self, "sft_weight", 0) else ("loss",)

    @property
    def figures(self) -> Mapping[str, LoggedFigure]:
        """Rewards and what else is measured, and the terms of the loss where there are several."""
        several = self.losses if len(self.losses) > 1 else ()
        return {**self.measured, **{name: LoggedFigure("lower", name[:7]) for name in several}}


class DpoMethod(PairSection):
    """Direct preference optimization: which of two answers is preferred, against the model at the start."""

    lr: ClassVar[float | None] = 1e-6

    kind: MethodKind[Literal["dpo"]] = "dpo"
    beta: Beta = 0.1
    loss: Annotated[Mapping[DpoLoss, float], WeightedWords()] = {"sigmoid": 1.0}
    """The loss of a pair, or several with their weights, such as {sigmoid: 0.8, bco: 0.2}."""
    label_smoothing: Annotated[float, Real(ge=0, lt=0.5)] = 0.0
    """Share of the pairs that are taken to be labelled the wrong way round, by the losses sigmoid and robust."""
    margin: Margin = "none"
    sft_weight: SftWeight = 0.0
    reference: Reference = "auto"

    @property
    def losses(self) -> tuple[str, ...]:
        """Those of ``loss``, and `sft`."""
        names = (*self.loss, *(("sft",) if self.sft_weight else ()))
        return names if len(names) > 1 else ("loss",)

    @model_validator(mode="after")
    def _has_what_its_loss_takes(self) -> DpoMethod:
        if self.label_smoothing and not {"sigmoid", "robust"} & set(self.loss):
            raise refuse(f"loss {' and '.join(self.loss)} has no label_smoothing; write it with sigmoid or robust")
        if self.margin == "rows" and not {"sigmoid", "robust", "hinge"} & set(self.loss):
            raise refuse(f"loss {' and '.join(self.loss)} has no margin; write it with sigmoid or hinge")
        if "robust" in self.loss and not self.label_smoothing:
            raise refuse("loss robust is sigmoid at label_smoothing 0; write label_smoothing, such as 0.1")
        return self


class OrpoMethod(PairSection):
    """Odds ratio preference optimization: learns chosen answers, and to prefer them, without a reference."""

    lr: ClassVar[float | None] = 8e-6

    kind: MethodKind[Literal["orpo"]] = "orpo"
    beta: Beta = 0.1

    @property
    def losses(self) -> tuple[str, ...]:
        """Cross-entropy of chosen answers, and the odds ratio's loss."""
        return ("sft", "odds_ratio")


class SimpoMethod(PairSection):
    """Simple preference optimization: by average log-probabilities, without a reference."""

    lr: ClassVar[float | None] = 1e-6

    kind: MethodKind[Literal["simpo"]] = "simpo"
    beta: Beta = 2.0
    gamma: Annotated[float, Real(ge=0)] = 1.0
    """How far apart the rewards, beta times average log-probabilities, are wanted: the margin inside the loss."""
    sft_weight: SftWeight = 0.0


class CpoMethod(PairSection):
    """Contrastive preference optimization: by log-probabilities, without a reference, and by chosen answers."""

    lr: ClassVar[float | None] = 1e-6

    kind: MethodKind[Literal["cpo"]] = "cpo"
    beta: Beta = 0.1
    sft_weight: SftWeight = 1.0


class KtoMethod(MethodSection):
    """Kahneman-Tversky optimization: which answers are desirable, one by one, against the model at the start."""

    lr: ClassVar[float | None] = 1e-6

    kind: MethodKind[Literal["kto"]] = "kto"
    beta: Beta = 0.1
    baseline: Word[Literal["kl", "zero"]] = "kl"
    """What log-ratios are measured against: kl, the divergence from the reference in a global batch; zero: nothing."""
    desirable_weight: Annotated[float, Real(gt=0)] = 1.0
    """Weight of desirable answers: keep it times their number near that of undesirable ones, or up to a third above."""
    undesirable_weight: Annotated[float, Real(gt=0)] = 1.0
    """Weight of undesirable answers."""
    reference: Reference = "auto"
    examples: ClassVar[Examples] = Examples("unpaired", "last_assistant")

    @property
    def figures(self) -> Mapping[str, LoggedFigure]:
        """Rewards by label, and the divergence from the reference."""
        return _logged("reward_desirable", "reward_undesirable", *(["kl"] if self.baseline == "kl" else []))


class RewardMethod(PairSection):
    """A reward model: a score for an answer, learned from which of two is preferred."""

    measured: ClassVar[Mapping[str, LoggedFigure]] = _REWARDS

    kind: MethodKind[Literal["reward"]] = "reward"
    center: Annotated[float, Real(ge=0)] = 0.0
    """Weight of the mean of (chosen + rejected)^2, which keeps rewards around 0; 0.01 is usual, 0 leaves it out."""
    margin: Margin = "none"

    @property
    def losses(self) -> tuple[str, ...]:
        """That of the pairs, and `center`."""
        return ("ranking", "center") if self.center else ("loss",)


Head = Literal["tokens", "score"]
"""What stands on a model's decoder: a causal model's output layer, or the score of a reward model."""


def head_of(method: Section) -> Head:
    """What a method trains on the decoder."""
    return "score" if isinstance(method, RewardMethod) else "tokens"


_TOP_K = (
    "Tokens of the teacher's distribution that are kept with the prepared data, computed once, so that training loads "
    "no teacher; null keeps the teacher in memory, and all of its distribution."
)
_TEACHER_EVERY = (
    "How often a newer version of the teacher is looked for and taken: method.teacher is then a directory whose "
    "step-N are models, such as the exports of a run."
)
_TAIL = (
    "With top_k, the teacher's remaining probability: rest makes all other tokens one class, in both distributions; "
    "renormalise gives it to the top_k, which needs beta below 1."
)


class DistillMethod(MethodSection):
    """Distillation: the student learns the teacher's distribution of every next token."""

    kind: MethodKind[Literal["distill"]] = "distill"
    teacher: Annotated[str, Text(what="a hub name (owner/name) or a local directory")]
    """Hub name or local directory of the teacher, which has the student's tokenizer (required)."""
    teacher_revision: Annotated[str | None, Text(what="a commit or tag")] = None
    """Hub commit or tag of the teacher."""
    teacher_every: Annotated[Durations | None, CadenceSpan(units=("steps",)), Field(description=_TEACHER_EVERY)] = None
    beta: Annotated[float, Real(ge=0, le=1)] = 0.0
    """The divergence: 0 is KL(teacher || student), 1 KL(student || teacher), and between them Jensen-Shannon's."""
    temperature: Annotated[float, Real(gt=0)] = 1.0
    """Both models' logits are divided by it, and the divergence counts its square."""
    ce_weight: Annotated[float, Real(ge=0, le=1)] = 0.0
    """Share of the data's cross-entropy in the loss; the rest is the divergence's."""
    top_k: Annotated[int | None, Whole(ge=1, le=2**20), Field(description=_TOP_K)] = None
    tail: Annotated[Word[Literal["rest", "renormalise"]], Field(description=_TAIL)] = "rest"
    rows: Rows = "sft"
    train_on: TrainOn = "assistant"

    @property
    def examples(self) -> Examples:
        """Those of the method that ``rows`` names."""
        return Examples("sft", self.train_on) if self.rows == "sft" else Examples("pretrain")

    @property
    def figures(self) -> Mapping[str, LoggedFigure]:
        """The divergence, cross-entropies of both models, and how often they agree."""
        return _logged("divergence", "ce", "teacher_ce", "agreement", *(["tail"] if self.top_k is not None else []))


class CustomMethod(MethodSection):
    """A custom loss."""

    kind: MethodKind[Literal["custom"]] = "custom"
    use: Use
    """FILE.py:NAME, or the name of an entry point of the group tuner.methods: called with `options`, gives the loss."""
    options: Options = {}
    """Keyword arguments of the function."""
    rows: Rows = "sft"
    train_on: TrainOn = "assistant"

    @property
    def examples(self) -> Examples:
        """Those of the method that ``rows`` names."""
        return Examples("sft", self.train_on) if self.rows == "sft" else Examples("pretrain")


Method = Annotated[
    SftMethod | PretrainMethod | DpoMethod | OrpoMethod | SimpoMethod | CpoMethod | KtoMethod | RewardMethod
    | DistillMethod | CustomMethod,
    ByKind(),
]
"""A method's section; each kind has a file of its name in `train/methods`."""
