"""Preference, reward and distillation trainings of other tools: their kinds, losses and weights in our words."""

from collections.abc import Mapping
from typing import Any

from tuner.config.numbers import write_number
from tuner.config.other_data import component_name, table
from tuner.config.other_rules import Given, Lines, listed, number, number_of, words
from tuner.config.other_tools import foreign, of_value

PAIRS = frozenset(("dpo", "orpo", "simpo", "cpo", "reward"))
"""Kinds whose examples are two answers to one prompt."""
PREFERENCES = PAIRS | {"kto"}
_SUPERVISED = "a loss of supervised fine-tuning is method.reduction here, or method.kind: custom"


def kind_of(given: Given) -> str | None:
    """Our kind of the preference training that a configuration asks for; None where it asks for none."""
    if str(given.get("stage")).lower() in {"sft", "pt", "ppo"}:
        return None
    for name in ("rl", "rlhf_type", "stage", "trainer_type", "method.kind"):
        word = str(given.get(name)).lower().removeprefix("trl_")
        named = _names(given.get("pref_loss", given.get("loss_type")))
        if word in {"dpo", "cpo"} and named in (["orpo"], ["simpo"]):
            return named[0]
        if found := table("kinds").get(word):
            return str(found)
    if str(given.get("loss._component_")).endswith(".rlhf.loss.DPOLoss"):
        return "dpo"
    if given.get("reward_model") is True or "center_rewards_coefficient" in given:
        return "reward"
    if any(name in given for name in ("desirable_weight", "undesirable_weight")):
        return "kto"
    named = _names(given.get("loss_type"))
    if "simpo" in named:
        return "simpo"
    if "cpo_alpha" in given:
        return "cpo"
    is_loss = bool(named) and {*named} <= {*table("losses"), "sft"}
    if is_loss or any(name in given for name in ("precompute_ref_log_probs", "ref_model", "pref_beta", "rl_beta",
                                                "rpo_alpha", "loss_weights")):
        return "dpo"
    return None


def kind(value: Any, given: Given) -> Lines | str | None:
    """A key that names the kind, such as `rl` or `stage`; the loss that some of its words stand for comes with it."""
    word = str(value).lower().removeprefix("trl_").removeprefix("verl_")
    if word == "sft":
        return {"method.kind": "sft"}
    ours = kind_of({**given, "rl": word})
    if ours is None or word not in table("kinds"):
        return of_value("method.kind", word)
    return {"method.kind": ours} | ({"method.loss": "ipo"} if word == "ipo" else {})


def reward_switch(value: Any, given: Given) -> Lines | str | None:
    """`reward_model: true` trains one; the path of one belongs to PPO."""
    if value is True:
        return {"method.kind": "reward"}
    return None if value is False else of_value("method.kind", "ppo")


def losses(value: Any, given: Given) -> Lines | str | None:
    """One loss of dpo or several; orpo and simpo among them are kinds of their own."""
    named = _names(value)
    ours = kind_of({**given, "loss_type": value})
    if ours is None:
        return _SUPERVISED
    if ours != "dpo":
        if named == ["apo_zero_unpaired"]:
            return {"method.baseline": "zero"}
        return {} if named in ([ours], ["sigmoid"], []) else f"not supported: {ours} with the loss {', '.join(named)}"
    known = table("losses")
    absent = [name for name in named if known.get(name) is None and name != "sft"]
    if absent:
        alike = ", ".join(filter(None, known.values()))
        return f"not supported: the loss {', '.join(absent)}; instead method.loss with one of {alike}"
    weights = given.get("loss_weights", given.get("dpo_loss_weights")) or [1.0] * len(named)
    if not isinstance(weights, list) or len(weights) != len(named):
        return None
    if named == ["robust"] and not number(given.get("label_smoothing", given.get("dpo_label_smoothing"))):
        named = ["sigmoid"]  # what robust is where no label is wrong
    terms = dict(zip(named, weights, strict=True))
    found: Lines = {"method.sft_weight": terms.pop("sft")} if "sft" in terms else {}
    if len(terms) > 1 or any(weight != 1 for weight in terms.values()):
        found["method.loss"] = {known[name]: weight for name, weight in terms.items()}
    elif terms and "sigmoid" not in terms:
        found["method.loss"] = known[next(iter(terms))]
    return found


def gamma(value: Any, given: Given) -> Lines | str | None:
    """SimPO's margin, which counts for no other loss."""
    return {"method.gamma": value} if kind_of(given) in {"simpo", None} else {}


def cpo_alpha(value: Any, given: Given) -> Lines | str | None:
    """The supervised term of CPO, which TRL adds to SimPO too unless it is set to 0."""
    return {} if number(value) == 0 and kind_of(given) == "simpo" else number_of(value, given, "method.sft_weight")


def smoothing(value: Any, given: Given) -> Lines | str | None:
    """The share of labels that may be wrong; in TRL 1.16 a plain sigmoid ignores it."""
    share, named = number(value), _names(given.get("loss_type", given.get("dpo_loss_type")))
    if not share:
        return {}
    if kind_of(given) is None:
        return "not supported: label smoothing of next-token losses; instead method.kind: custom with method.use"
    is_factory = "pref_loss" in given or "pref_beta" in given or given.get("stage") == "dpo"
    if is_factory or named == ["robust"]:
        return {"method.label_smoothing": value}
    return (
        f"TRL 1.16 ignores {write_number(share)} with the sigmoid loss, so nothing is lost; to smooth labels here, "
        f"write method.label_smoothing: {write_number(share)}"
    )


def precomputed(value: Any, given: Given) -> Lines | str | None:
    """Where the reference's log-probabilities come from; with an adapter they need no model of their own."""
    is_compared = kind_of(given) in {"dpo", "kto", None}
    return {"method.reference": "columns"} if value is True and is_compared else {}


def reference_model(value: Any, given: Given) -> Lines | str | None:
    """Another reference than the model at the start."""
    if value in [given.get(name) for name in ("base_model", "model_name_or_path", "model")]:
        return {}
    return "not supported: a reference other than the model at the start; instead start from it: model.name_or_path"


def is_taught(given: Given) -> bool:
    """Whether a key names a teacher, whole or as a section."""
    return any(str(key).partition(".")[0] in foreign()["method.teacher"] for key in given)


def teacher(value: Any, given: Given) -> Lines | str | None:
    """torchtune's component that reads the teacher; half of its loss is cross-entropy unless it says otherwise."""
    place = value.get("checkpoint_dir") if isinstance(value, Mapping) else value
    if not isinstance(place, str):
        return None
    share = {} if "kd_ratio" in given else {"method.ce_weight": 0.5}
    return {"method.kind": "distill", "method.teacher": place} | share


def kd_ratio(value: Any, given: Given) -> Lines | str | None:
    """The share of the divergence; ours is that of the cross-entropy."""
    share = number(value)
    return {"method.ce_weight": float(1 - share)} if share is not None and 0 <= share <= 1 else None


def kd_loss(value: Any, given: Given) -> Lines | str | None:
    """torchtune's component of the divergence, forward by default as here."""
    name = component_name(value)
    if name.startswith("SymmetricKL"):
        return "not supported: both divergences, added up; instead method.beta: 0.5, Jensen-Shannon's between them"
    return {"method.beta": 1.0} if name.startswith("ReverseKL") else {} if name.startswith("ForwardKL") else None


_STAGES = {"sft": "sft", "pt": "pretrain", "pretrain": "pretrain"}


def stage(value: Any, given: Given) -> Lines | str | None:
    """A kind of training, of pre-training and supervised fine-tuning as of preferences."""
    return words(value, given, "method.kind", _STAGES) if str(value).lower() in _STAGES else kind(value, given)


_TEMPLATES = ("chatml", "llama3", "zephyr")


def template_of(sets: Any) -> str | None:
    """The chat template that axolotl's types of preference data sets write themselves, such as `chatml.intel`."""
    items = sets if isinstance(sets, list) else [sets]
    types = {str(item.get("type")).partition(".")[0] for item in items if isinstance(item, Mapping)}
    return next((name for name in _TEMPLATES if types == {name}), None)


def _names(value: Any) -> list[str]:
    """Losses in a list, or one, or several separated by commas."""
    return [name.lower() for name in listed(value)]
