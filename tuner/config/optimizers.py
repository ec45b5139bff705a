"""The optimizer section of the recipe: one class for each kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tuner.config.numbers import Rate, Real, Whole
from tuner.config.section import Auto, Bool, ByKind, Items, Options, Section, Use
from tuner.config.value_types import Several, T, Text, Word, refuse

Lr = Annotated[float | Auto, Rate()]
"""Above 1 a step of these kinds, which is about as long as the rate, is longer than any weight."""
Betas = Annotated[tuple[float, float], Several(item=Real(ge=0, lt=1), length=2)]
Eps = Annotated[float, Real(gt=0)]
Share = Annotated[float, Real(ge=0, lt=1)]
Decay = Annotated[float, Real(ge=0)]


class ParameterGroup(Section):
    """Parameters with their own learning rate or weight decay."""

    match: Annotated[tuple[str, ...], Several(item=Text(what="names or globs"))]
    """Parameters of the group: names or globs; one that several groups mean is in the first of them."""
    lr: Annotated[float | None, Real(gt=0)] = None
    """Their peak learning rate; null takes the optimizer's."""
    weight_decay: Annotated[float | None, Real(ge=0)] = None
    """Their decay, of the matrices among them; null takes the optimizer's."""

    @model_validator(mode="after")
    def _sets_something(self) -> ParameterGroup:
        if self.lr is None and self.weight_decay is None:
            raise refuse("a group that sets neither lr nor weight_decay; write one of them")
        return self


class RowOptimizer(Section):
    """Embeddings that are updated row by row, by an AdamW of their own."""

    match: Annotated[tuple[str, ...], Several(item=Text(what="names or globs"))]
    """Embeddings of input tokens: names or globs; one that several items mean is in the first of them."""
    lr: Annotated[float | None, Real(gt=0)] = None
    """Their peak learning rate; null takes that of their group, or the optimizer's for embeddings."""
    weight_decay: Annotated[float | None, Real(ge=0)] = None
    """Decay of a row in a step that has its token, and in no other; null takes that of their group or optimizer."""
    betas: Annotated[tuple[float, float] | None, Several(item=Real(ge=0, lt=1), length=2)] = None
    """Decay rates of the two running averages; null takes the optimizer's, or 0.9 and 0.95 where it has none."""
    eps: Annotated[float | None, Real(gt=0)] = None
    """Added to the denominator for stability; null takes the optimizer's, or 1e-8 where it has none."""


GROUPS = Items(ParameterGroup, "a list of {match, lr, weight_decay}")
ROWS = Items(RowOptimizer, "a list of {match, lr, weight_decay, betas, eps}")
_OPTIMIZER_KIND = (
    "adamw, sgd, adafactor, muon for hidden matrices with adamw for the rest, or custom for one of your own."
)
OptimizerKind = Annotated[Word[T], Field(description=_OPTIMIZER_KIND)]
_DECOUPLED_DECAY = "Decoupled weight decay, per unit of learning rate; never on norms, biases and other vectors."
DecoupledDecay = Annotated[Decay, Field(description=_DECOUPLED_DECAY)]
_GROUPS = "Parameters with settings of their own: {match, lr, weight_decay} each."
Groups = Annotated[tuple[ParameterGroup, ...], GROUPS, Field(description=_GROUPS)]
_ROWS = "Embeddings whose rows are updated in steps that have their tokens: {match, lr, weight_decay, betas, eps} each."
Rows = Annotated[tuple[RowOptimizer, ...], ROWS, Field(description=_ROWS)]


class AdamwOptimizer(Section):
    """AdamW with decoupled weight decay."""

    kind: OptimizerKind[Literal["adamw"]] = "adamw"
    lr: Lr = "auto"
    """Peak learning rate; auto: by method, or 2e-4 adapter, 3e-4 random weights, 1e-4 below 500M, 2e-5 above."""
    betas: Betas = (0.9, 0.95)
    """Decay rates of the two running averages."""
    eps: Eps = 1e-8
    """Added to the denominator for stability."""
    state: Word[Literal["fp32", "8bit"]] = "fp32"
    """Numbers of the running averages: fp32, or 8bit for matrices of 4,096 numbers or more other than embeddings."""
    rounding: Word[Literal["nearest", "stochastic"]] = "nearest"
    """Of updated weights: nearest; or stochastic, whose mean is the number: with it bf16 weights can be trained."""
    weight_decay: DecoupledDecay = 0.0
    offload: Word[Literal["none", "host"]] = "none"
    """Where its states lie and the update is computed: none, on the device; host, in the host's memory and cores."""
    groups: Groups = ()
    rows: Rows = ()


class SgdOptimizer(Section):
    """Gradient descent with momentum; no learning rate suits every model, so it must be given."""

    kind: OptimizerKind[Literal["sgd"]] = "sgd"
    lr: Annotated[float, Real(gt=0)]
    """Peak learning rate; sgd has no auto."""
    momentum: Share = 0.9
    """Decay rate of the running average of the gradients; 0 keeps none."""
    nesterov: Bool = False
    """Look ahead along the momentum."""
    weight_decay: Decay = 0.0
    """Share of the weights added to the gradient; never on norms, biases and other vectors."""
    groups: Groups = ()
    rows: Rows = ()


class AdafactorOptimizer(Section):
    """Adafactor: second moments of matrices as a row and a column."""

    kind: OptimizerKind[Literal["adafactor"]] = "adafactor"
    lr: Lr = "auto"
    """Peak learning rate; auto as for adamw."""
    decay_rate: Annotated[float, Real(gt=-1, lt=0)] = -0.8
    """Exponent of the step in the decay of the second moments, 1 - step ** decay_rate."""
    clip_threshold: Annotated[float, Real(gt=0)] = 1.0
    """Root mean square of a parameter's update above which it is scaled down, before the learning rate."""
    scale_parameter: Bool = False
    """Take learning rates relative to the root mean square of each parameter, at least 1e-3; needs an lr of its own."""
    weight_decay: DecoupledDecay = 0.0
    groups: Groups = ()
    rows: Rows = ()


class MuonOptimizer(Section):
    """Muon for hidden matrices, AdamW for embeddings, the output layer, norms and biases."""

    kind: OptimizerKind[Literal["muon"]] = "muon"
    lr: Lr = "auto"
    """Peak learning rate of the hidden matrices; auto as for adamw."""
    adamw_lr: Lr = "auto"
    """Peak learning rate of the parameters that muon leaves to adamw; auto takes that of lr."""
    adjust_lr: Word[Literal["match_rms_adamw", "original"]] = "match_rms_adamw"
    """Factor by shape: match_rms_adamw makes updates as large as AdamW's; original, sqrt(max(1, rows / columns))."""
    momentum: Share = 0.95
    """Decay rate of the running average of the gradients."""
    nesterov: Bool = True
    """Look ahead along the momentum."""
    ns_steps: Annotated[int, Whole(ge=1, le=20)] = 5
    """Newton-Schulz steps towards an orthogonal update."""
    betas: Betas = (0.9, 0.95)
    """Decay rates of adamw's two running averages."""
    eps: Eps = 1e-8
    """Added to adamw's denominator for stability."""
    weight_decay: DecoupledDecay = 0.0
    groups: Groups = ()
    rows: Rows = ()


class CustomOptimizer(Section):
    """A custom optimizer; it has no auto for its learning rate, so that must be given."""

    kind: OptimizerKind[Literal["custom"]] = "custom"
    use: Use
    """FILE.py:NAME or an entry point of the group tuner.optimizers: called with groups, lr and `options`."""
    lr: Annotated[float, Real(gt=0)]
    """Peak learning rate; custom has no auto."""
    options: Options = {}
    """Keyword arguments of the class or function, in addition to lr and weight_decay."""
    elementwise: Bool = False
    """Whether each element's update looks at no other element: only then can parameters be sharded."""
    weight_decay: Decay = 0.0
    """Handed over in each group for the optimizer to apply; 0 for norms, biases and other vectors."""
    groups: Groups = ()
    rows: Rows = ()

    @model_validator(mode="after")
    def _has_one_place_for_each(self) -> CustomOptimizer:
        if twice := [name for name in ("lr", "weight_decay") if name in self.options]:
            raise refuse(f"{twice[0]} among the options; write optimizer.{twice[0]}, which each group is given")
        return self


Optimizer = Annotated[AdamwOptimizer | SgdOptimizer | AdafactorOptimizer | MuonOptimizer | CustomOptimizer, ByKind()]
"""One of them, by its `kind`."""


def rounds_stochastically(section: Section) -> bool:
    """Whether bf16 weights can be trained with an optimizer: to the nearest, small updates would be lost."""
    return isinstance(section, AdamwOptimizer) and section.rounding == "stochastic"


def keeps_states_on_host(section: Section) -> bool:
    """Whether the states of an optimizer lie in the host's memory, where its update is computed as well."""
    return isinstance(section, AdamwOptimizer) and section.offload == "host"
