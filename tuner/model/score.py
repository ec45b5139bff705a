"""The score of a reward model, in place of a causal model's output layer: one number for each hidden state.

The model is transformers' own sequence-classification class of one label, whose decoder is the causal model's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from tuner.errors import RecipeError
from tuner.model.transformers_private import plain_config

LABEL = "reward"
"""What a score is called where transformers names labels."""
_KEY = "score.weight"


def require_scores(config: transformers.PretrainedConfig) -> None:
    """Have the config make transformers' class with one score, in place.

    Raises RecipeError where transformers has no such class for this type of model, and for a model of several labels.
    """
    kind: Any = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None or isinstance(kind, tuple):
        raise _refused(
            f"transformers has no sequence-classification class for {config.model_type} models",
            hint="choose a model that has one, such as a Llama, Qwen or Gemma",
        )
    classifies = any("ForSequenceClassification" in name for name in config.architectures or ())
    if classifies and config.num_labels != 1:
        raise _refused(
            f"the model has {config.num_labels} labels, and a reward model has one score",
            hint="choose the causal language model that it was made of",
        )
    config.architectures = [kind.__name__]
    config.id2label, config.label2id = {0: LABEL}, {LABEL: 0}
    config.problem_type = "regression"  # else transformers' pipeline puts a sigmoid on the score


def require_score_layer(model: transformers.PreTrainedModel) -> None:
    """Check that the score is one product with the decoder's hidden states. Raises RecipeError."""
    layer: Any = getattr(model, "score", None)
    names = [name for name, _ in layer.named_parameters()] if isinstance(layer, nn.Linear) else []
    if names != ["weight"] or layer.out_features != 1:
        raise _refused(f"{type(model).__name__} scores otherwise than by one linear layer")


def _refused(why: str, hint: str = "choose another model, such as a Llama, Qwen or Gemma") -> RecipeError:
    return RecipeError(f"method.kind: reward: {why}", hint=hint)


@torch.no_grad()
def draw_score(model: transformers.PreTrainedModel, seed: int) -> None:
    """Draw the score's weight float32 ``[1, D]`` from the seed, as transformers draws linear layers, in place."""
    weight = model.get_parameter(_KEY)
    deviation = getattr(model.config.get_text_config(), "initializer_range", None) or 0.02
    drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    weight.data = drawn * deviation


def give_score(model: transformers.PreTrainedModel, report: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Draw the score of a model that was loaded from a causal one's files; the rest of transformers' report on them.

    A causal model's output layer is left over then, and of no use. Files that hold a score keep it.
    """
    missing = set(map(str, report.get("missing_keys") or ()))
    if _KEY not in missing:
        return dict(report)
    draw_score(model, seed)
    left = set(map(str, report.get("unexpected_keys") or ()))
    of_output = tuple(f"{name}.{part}" for name in _output_names(model.config) for part in ("weight", "bias"))
    left = {name for name in left if not name.endswith(of_output)}
    return {**report, "missing_keys": missing - {_KEY}, "unexpected_keys": left}


def _output_names(config: transformers.PretrainedConfig) -> list[str]:
    """Names of the causal model's output layer."""
    with torch.device("meta"):
        causal = transformers.AutoModelForCausalLM.from_config(plain_config(config))
    output = causal.get_output_embeddings()
    return [name for name, module in causal.named_modules() if module is output]


def scored(model: transformers.PreTrainedModel, run: Callable[[], object]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the score was applied to while the model ran, and what it made of that."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    layer = model.get_submodule("score")
    with layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output))):
        run()
    return seen[-1]


def hidden_of_class(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Hidden states ``[T, D]`` that transformers' class scores, for one sequence int64 ``[T]``.

    Raises RecipeError where its score of the sequence is not that of the last token.
    """
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = None  # one sequence alone has no padding, whatever its last token is
    found: list[torch.Tensor] = []
    hidden, scores = scored(model, lambda: found.append(model(input_ids=ids[None], use_cache=False).logits))
    if not torch.equal(found[0].flatten(), scores[0, -1].flatten()):
        raise _refused(f"{type(model).__name__} scores another token than the last")
    return hidden[0].float()
