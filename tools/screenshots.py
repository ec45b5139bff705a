"""Pictures of the pages that `tuner` writes, of real commands: what the README shows.

    python tools/screenshots.py [--out docs/images] [--steps 150]

`tuner runs plot` over two pre-trainings of a small Llama on the bytes of docs/*.md, at different learning rates;
and `tuner profile` of an 8B Llama in full on eight H100, predicted here. Headless Chromium (Debian's `chromium`) draws
them. It takes some minutes.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import Browser, chromium  # noqa: E402

RATES = {"llama": "1e-3", "llama-lr1e-4": "1e-4"}
MODEL = ROOT / "recipes" / "models" / "tiny-llama"
RECIPE = """\
model:
  name_or_path: {model}
  init: random
  config: {{hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4}}
tokenizer: {{name_or_path: byte}}
method: {{kind: pretrain}}
data: {{train: {data}, eval: 5%, max_length: 512}}
train: {{duration: {steps} steps, global_batch_size: 4, micro_batch_size: 4}}
eval: {{every: 10%, samples: 0}}
"""
LARGE = """\
model:
  name_or_path: {model}
  init: random
  config:
    hidden_size: 4096
    intermediate_size: 14336
    num_hidden_layers: 32
    num_attention_heads: 32
    num_key_value_heads: 8
    vocab_size: 128256
    max_position_embeddings: 8192
    tie_word_embeddings: false
tokenizer: {{name_or_path: byte}}
method: {{kind: pretrain}}
data: {{train: llama-8b.yaml, max_length: 4096}}
train: {{duration: 1000 steps, global_batch_size: 64, micro_batch_size: 1, gradient_checkpointing: selective}}
"""


def tuner(place: Path, *words: str) -> str:
    """Standard output of a command; its standard error is shown."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TUNER_CACHE": str(place / "cache")}
    command = [sys.executable, "-m", "tuner", *words]
    return subprocess.run(command, cwd=place, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def pages(place: Path, steps: int) -> dict[str, Path]:
    """The pages to draw, by the name of their picture."""
    recipe = RECIPE.format(model=json.dumps(str(MODEL)), data=json.dumps(str(ROOT / "docs" / "*.md")), steps=steps)
    (place / "llama.yaml").write_text(recipe, encoding="utf-8")
    for name, rate in RATES.items():
        tuner(place, "train", "llama.yaml", "--name", name, "--optimizer.lr", rate)
    curves = tuner(place, "runs", "plot", *(f"runs/{name}" for name in RATES), "--smoothing", "0.6")
    (place / "llama-8b.yaml").write_text(LARGE.format(model=json.dumps(str(MODEL))), encoding="utf-8")
    tuner(place, "profile", "llama-8b.yaml", "--device", "h100-80g", "--processes", "8", "--output", "profile")
    return {"curves": place / curves, "profile": place / "profile" / "report.html"}


def picture(browser: Browser, page: Path, out: Path, height: int) -> None:
    """Draw the top of a page, 1280 pixels wide, in light colours."""
    browser.open(page)
    view = {"x": 0, "y": 0, "width": 1280, "height": height, "scale": 1}
    found = browser("Page.captureScreenshot", format="png", clip=view, captureBeyondViewport=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(base64.b64decode(found["data"]))
    print(out)


def main() -> int:
    """Train, plot, draw; exit code 1 where there is no browser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="where the pictures go")
    parser.add_argument("--steps", type=int, default=150, help="steps of each training")
    parser.add_argument("--height", type=int, default=760, help="of the pictures, in pixels")
    parser.add_argument("--work", type=Path, help="an empty directory that is kept; default: one that goes")
    options = parser.parse_args()
    program = chromium()
    if program is None:
        print("no Chromium: apt-get install chromium, or set TUNER_TEST_CHROMIUM", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as home:
        place = (options.work or Path(scratch)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        found = pages(place, options.steps)
        with Browser(program, Path(home)) as browser:
            for name, page in found.items():
                picture(browser, page, options.out / f"{name}.png", options.height)
    return 0


if __name__ == "__main__":
    sys.exit(main())
