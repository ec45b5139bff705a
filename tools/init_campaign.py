"""`tuner init` on rows of 51 kinds: the recipe is the right one, is taken, and loses nothing that it does not say.

    python -m tools.init_campaign [--only WORDS] [--small]

Of each case of `init/cases.py` the real commands are run: `init`, `config check` of what it prints, `prepare-data` of
the same (with `on_bad_row: skip` where the recipe says that rows are bad). The recipe has to have the values that are
written down there; what preparation leaves out has to be what the recipe counts, and of the tokens that it keeps a row
of, 1 % at most. Exits with 1 where anything is not so.
"""

import json
import random
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from tools.commands import asked, environment, run, workplace
from tools.init.cases import Case, cases

POSITIONS = {"short": 2048, "medium": 8192}
CUT = 0.01
"""The share of the tokens that may be left out."""
_DROPPED = re.compile(r"([\d,]+) (?:document|pair)s? \([\d.]+% of the tokens\) (?:is|are) longer and (?:dropped|cut)")
_NOTHING = re.compile(r"([\d,]+) with nothing to learn")
_BAD = re.compile(r"# on_bad_row: skip +# (?:at least )?([\d,]+) rows? cannot be read")


def write_models(directory: Path) -> None:
    """Models of which a look needs a tokenizer and a config."""
    import torch

    from tuner.config.recipe import AddedToken
    from tuner.data.encoding.tokenizer import byte_files, with_tokens
    from tuner.data.encoding.tokenizer_files import template_source
    from tuner.model.build import ModelSpec, build_model

    ends = [AddedToken(token=token, special=True) for token in ("<|im_start|>", "<|im_end|>")]
    files, _ = with_tokens(byte_files(), ends)
    # As many instruct models have it: no place for tools, nor for a thought.
    own = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    templates = {"chat": own, "short": own, "medium": own, "tools": template_source("qwen"), "base": None}
    for name, template in templates.items():
        (directory / name).mkdir()
        config = {"max_position_embeddings": POSITIONS.get(name, 32_768), "model_type": "llama", **SIZES}
        written = {key: content for key, content in files.items() if key != "chat_template.jinja"}
        written["config.json"] = json.dumps(config).encode()
        if template is not None:
            written["chat_template.jinja"] = template.encode()
        for file, content in written.items():
            (directory / name / file).write_bytes(content)
        model = build_model(ModelSpec(str(directory / name), random_init=True), torch.float32, 0)
        model.save_pretrained(directory / name)


SIZES = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


def tuner(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the real command there, with nothing but what is on this machine."""
    return run(["-m", "tuner", *words], directory, environment(directory / "cache", HF_HUB_OFFLINE="1", NO_COLOR="1"))


def wrong_with(case: Case, directory: Path) -> list[str]:
    """What is not as it has to be."""
    model = "owner/away" if case.model == "away" else f"../{case.model}"
    done = tuner(directory, "init", "-m", model, "-d", case.source)
    if done.returncode:
        return [f"init ended with {done.returncode}: {done.stderr.strip()}"]
    text = done.stdout
    (directory / "recipe.yaml").write_text(text, encoding="utf-8")
    wrong = wrong_values(case, text)
    if case.model == "away":
        return wrong
    checked = tuner(directory, "config", "check", "recipe.yaml")
    if checked.returncode:
        wrong.append(f"config check ended with {checked.returncode}: {checked.stderr.strip()}")
    flags = ["--data.on_bad_row", "skip"] if _BAD.search(text) else []
    prepared = tuner(directory, "prepare-data", "recipe.yaml", "--json", *flags)
    if prepared.returncode:
        return [*wrong, f"prepare-data ended with {prepared.returncode}: {prepared.stderr.strip()}"]
    return wrong + wrong_losses(case, text, json.loads(prepared.stdout)["metrics"])


def wrong_values(case: Case, text: str) -> list[str]:
    """What of the recipe's values is not right."""
    from ruamel.yaml import YAML

    recipe: dict[str, Any] = YAML(typ="safe").load(text)
    source = recipe["data"]["train"]
    reads = {key: source[key] for key in ("format", "columns") if key in source} if isinstance(source, dict) else {}
    right = case.right
    pairs = {
        "method.kind": (recipe["method"]["kind"], right.method),
        "data.max_length": (recipe["data"]["max_length"], right.max_length),
        "data.too_long": (recipe["data"].get("too_long"), "truncate" if right.truncates else None),
        "tokenizer.chat_template": (recipe.get("tokenizer", {}).get("chat_template"), right.template),
        "how rows are read": (reads, right.reads), "bad rows": (number(_BAD, text), right.bad),
    }
    unlike = {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}
    wrong = [f"{what}: {found!r}, and {wanted!r} is right" for what, (found, wanted) in unlike.items()]
    return wrong + [f"does not say {words!r}" for words in right.says if words not in text]


def number(pattern: re.Pattern[str], text: str) -> int:
    """The number that a recipe names, 0 where it names none."""
    match = pattern.search(text)
    return 0 if match is None else int(match[1].replace(",", ""))


def wrong_losses(case: Case, text: str, metrics: dict[str, Any]) -> list[str]:
    """What preparation leaves out and the recipe does not count, or too much of it."""
    wrong = []
    splits = [metrics[split] for split in ("train", "eval") if metrics[split] is not None]
    dropped = sum(sum(split["dropped_rows"].values()) for split in splits)
    skipped = sum(sum(split["skipped"].values()) + sum(split["dropped"].values()) for split in splits)
    said = number(_DROPPED, text)
    lost = sum(split["truncated"] for split in splits) if case.right.truncates else dropped
    if not lost == said == case.right.longer:
        wrong.append(f"{lost} documents are dropped or cut, the recipe says {said}, {case.right.longer} is right")
    if skipped != case.right.bad + case.right.empty or number(_NOTHING, text) != case.right.empty:
        wrong.append(f"{skipped} rows are skipped, {case.right.bad} + {case.right.empty} is right")
    tokens, kept = (sum(split[key] for split in splits) for key in ("tokens", "packed_tokens"))
    if case.right.in_bounds and kept < (1 - CUT) * tokens:
        wrong.append(f"{1 - kept / tokens:.1%} of the tokens are left out")
    return wrong


def main() -> int:
    """Run every case; returns 1 where something is wrong."""
    options = asked(__doc__, only="", small=(False, "leave out cases of more than 5 MB"))
    chosen = [case for case in cases() if options.only in case.name and not (options.small and case.is_large)]
    failed, began = 0, time.monotonic()
    with workplace() as place:
        write_models(place)
        for position, case in enumerate(chosen):
            directory = place / f"case{position}"
            for name, content in case.files(random.Random(position)).items():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_bytes(content)
            wrong = wrong_with(case, directory)
            failed += bool(wrong)
            print(f"{'WRONG' if wrong else 'right'} {case.name}", *wrong, sep="\n      ", flush=True)
    print(f"{len(chosen)} cases, {len(chosen) - failed} right, {failed} wrong, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
