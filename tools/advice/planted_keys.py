"""Wrong answers, planted one after the other into the tables that the answers come from: each has to be found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tuner.config import other_keys, other_tools
from tuner.config.other_rules import bound, count, number_of, switch, words

_RULES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "epochs are read as steps": ("num_train_epochs", bound(count, "train.duration", "steps")),
    "min_iterations is a bound on an early stop": ("min_iterations", bound(number_of, "train.min_steps")),
    "a share of warm-up is read as steps": ("warmup_ratio", bound(count, "schedule.warmup", "steps")),
    "the scale of an adapter is its rank": ("lora_rank", bound(number_of, "adapter.alpha")),
    "8 bits are taken for 4": ("load_in_8bit", bound(switch, "model.quantize", "nf4")),
    "every saved step is an evaluated one": ("save_steps", bound(count, "eval.every", "steps", "never")),
    "the prompt is never trained on": ("train_on_inputs", bound(switch, "method.train_on", "assistant", "assistant")),
    "orpo is answered with dpo": ("rl", bound(words, "method.kind", {"orpo": "dpo", "dpo": "dpo", "kto": "kto"})),
    "mixing by probability is a share": ("interleave_probs", lambda value, given: {"data.train.weight": 0.5}),
    "recomputing is turned round": (
        "gradient_checkpointing", bound(switch, "train.gradient_checkpointing", "none", "full"),
    ),
    "what is the default is not proposed": ("neat_packing", lambda value, given: "rows are packed as they fit"),
    "loading batches is encoding records": ("dataloader_num_workers", lambda value, given: {"data.workers": "auto"}),
}  # fmt: skip
"""What is wrong, and the key whose rule is replaced."""


@contextmanager
def planted(key: str, rule: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Replace the rule of one key, also where the key has none."""
    with patch.dict(other_keys.rules(), {key: rule}), patch.dict(other_tools.absent_names()):
        other_tools.absent_names().pop(key, None)
        other_keys.known_names.cache_clear()
        yield
    other_keys.known_names.cache_clear()


def missed() -> list[str]:
    """What was planted and not found among the answers to keys in a recipe."""
    from tools.advice.keys import by_error, cases, lost

    table = cases()
    found = []
    for wrong, (key, rule) in _RULES.items():
        named = [case for case in table if key in str(case.given)]
        with planted(key, rule):
            answers = [by_error(case) for case in named]
        if not any(answer.verdict == "wrong" for answer in answers) and not lost(answers):
            found.append(wrong)
    return found


def found_planted() -> int:
    """Plant them all; 1 where one is missed."""
    not_found = missed()
    print(f"{len(_RULES) - len(not_found)} of {len(_RULES)} planted wrong answers found")
    print("\n".join(f"missed: {wrong}" for wrong in not_found))
    return int(bool(not_found))
