"""Recompute the recorded logits of a checkpoint with plain transformers, where `tuner` cannot be imported.

    python -I plain.py EXPORTED_DIR BASE_DIR PROBE.safetensors

Prints one JSON object: the prompts compared, and the largest difference of the logits from the recorded ones, as a
share of the largest logit, for the exported model and for the base.
"""

import importlib.util
import json
import sys


def main() -> int:
    """Compare the exported model and the base with the recorded logits."""
    if importlib.util.find_spec("tuner") is not None:
        raise SystemExit("tuner can be imported here: this check must run without it")
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    exported, base, probe = sys.argv[1:]
    recorded = load_file(probe)
    scale = recorded["logits"].abs().max()
    report: dict[str, float] = {"prompts": len(recorded["lengths"])}
    for name, directory in (("exported", exported), ("base", base)):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        worst = torch.zeros(())
        for ids, length, wanted in zip(recorded["input_ids"], recorded["lengths"], recorded["logits"], strict=True):
            with torch.inference_mode():
                logits = model(ids[: int(length)].unsqueeze(0)).logits[0, -1]
            worst = torch.maximum(worst, (logits - wanted).abs().max())
        report[name] = float(worst / scale)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
