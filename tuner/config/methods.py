"""The method section of the recipe: one class for each kind, and what its examples are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tuner.config.numbers import Real
from tuner.config.section import Options, Section, Use
from tuner.config.value_types import T, Word

_METHOD_KIND = (
    "sft learns answers to prompts; pretrain every token of plain text; dpo which of two answers is preferred; "
    "custom has a loss of your own."
)
MethodKind = Annotated[Word[T], Field(description=_METHOD_KIND)]
_TRAIN_ON = "Which tokens are learned: those of every assistant turn, of the last one, or all."
TrainOn = Annotated[Word[Literal["assistant", "last_assistant", "all"]], Field(description=_TRAIN_ON)]


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
class Figure:
    """A mean over tokens, documents or pairs that a method measures next to its loss, in steps and in evaluations.

    Every method's section says its own by the property ``figures``: names in the order of their importance.
    """

    better: Literal["higher", "lower"]
    """Which of two values is the better one: ``checkpoint.keep_best`` goes by it."""
    heading: str
    """Its name where there is little room: at most 7 letters."""


_REWARDS: Mapping[str, Figure] = {
    "accuracy": Figure("higher", "acc"),
    "margin": Figure("higher", "margin"),
    "reward_chosen": Figure("higher", "chosen"),
    "reward_rejected": Figure("lower", "reject"),
}
"""What methods over pairs log: rewards of both answers, how far apart they are, and how often the chosen one wins."""


class SftMethod(Section):
    """Supervised fine-tuning on conversations or prompt and completion."""

    kind: MethodKind[Literal["sft"]] = "sft"
    train_on: TrainOn = "assistant"
    reduction: Word[Literal["token", "document", "sqrt"]] = "token"
    """Mean of the losses over a global batch: of tokens; of documents' means; or by square roots of their lengths."""

    @property
    def examples(self) -> Examples:
        """One document each, of turns or of a prompt and its completion."""
        return Examples("sft", self.train_on)

    @property
    def figures(self) -> Mapping[str, Figure]:
        """None: the loss says it all."""
        return {}


class PretrainMethod(Section):
    """Next-token prediction on plain text."""

    kind: MethodKind[Literal["pretrain"]] = "pretrain"

    @property
    def examples(self) -> Examples:
        """One document each, of plain text."""
        return Examples("pretrain")

    @property
    def figures(self) -> Mapping[str, Figure]:
        """None: the loss says it all."""
        return {}


_BETA = "How strongly the policy is held to the reference: the log-ratios are multiplied by it."
Beta = Annotated[float, Real(gt=0), Field(description=_BETA)]
_REFERENCE = (
    "Log-probabilities of the reference: columns computed once, before the first step, and kept with the prepared "
    "data, or adapter_off, computed in each step without the adapter; auto: adapter_off where there is an adapter."
)
Reference = Annotated[Word[Literal["auto", "columns", "adapter_off"]], Field(description=_REFERENCE)]


class DpoMethod(Section):
    """Direct preference optimization: which of two answers is preferred, against the model at the start."""

    kind: MethodKind[Literal["dpo"]] = "dpo"
    beta: Beta = 0.1
    reference: Reference = "auto"

    @property
    def examples(self) -> Examples:
        """Two documents each: the prompt with either answer, of which the answer is trained."""
        return Examples("preference", "last_assistant")

    @property
    def figures(self) -> Mapping[str, Figure]:
        """Implicit rewards."""
        return _REWARDS


class CustomMethod(Section):
    """A custom loss."""

    kind: MethodKind[Literal["custom"]] = "custom"
    use: Use
    """FILE.py:NAME, or the name of an entry point of the group tuner.methods: called with `options`, gives the loss."""
    options: Options = {}
    """Keyword arguments of the function."""
    rows: Word[Literal["sft", "pretrain"]] = "sft"
    """Which method's records it is trained on."""
    train_on: TrainOn = "assistant"

    @property
    def examples(self) -> Examples:
        """Those of the method that ``rows`` names."""
        return Examples("sft", self.train_on) if self.rows == "sft" else Examples("pretrain")

    @property
    def figures(self) -> Mapping[str, Figure]:
        """None that are known before it has run; an evaluation measures the cross-entropy."""
        return {}
