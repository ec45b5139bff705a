"""What a directory answers when plain transformers, or peft, loads it; runs where there is no tuner.

    python -I tools/plain_answers.py DIRECTORY [--base BASE] [--tokens N] PROMPT...

Prints a JSON list: of each prompt the greedy text and the logits after it, in float32. With a base the directory is an
adapter that `PeftModel` puts on it. Fails where tuner was imported after all.
"""

import argparse
import json
import sys
from typing import Any


def load(directory: str, base: str | None) -> Any:
    """The model in float32, as its users load it."""
    import torch
    from transformers import AutoModelForCausalLM

    if base is None:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    from peft import PeftModel
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    size = len(AutoTokenizer.from_pretrained(directory))
    if size > model.config.vocab_size:  # as the card of an adapter with new tokens says
        model.resize_token_embeddings(size)
    return PeftModel.from_pretrained(model, directory)


def answers(model: Any, tokenizer: Any, prompts: list[str], tokens: int) -> list[dict[str, Any]]:
    """Of each prompt the greedy continuation by so many tokens, and the logits at the prompt's last position."""
    import torch

    model.train(False)
    found = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=tokens,
            max_new_tokens=tokens,
        )
        found.append({"text": tokenizer.decode(made[0, ids.shape[1] :]), "logits": logits.tolist()})
    return found


def main() -> None:
    """Answer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--base")
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    sys.modules["tuner"] = None  # type: ignore[assignment] # whatever imports it fails, wherever it may lie
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.directory)
    print(json.dumps(answers(load(options.directory, options.base), tokenizer, options.prompts, options.tokens)))


if __name__ == "__main__":
    main()
