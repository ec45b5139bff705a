"""An export is published only where its readers get the ids of training from its tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data import spm
from tests.export import runs
from tuner.api.exports import export_hf
from tuner.errors import DataError, TunerError
from tuner.runtime.files import sha256_file

TEXTS = ["[INST] hello [/INST]", "hello</s> world", "w6 user w7", " a  b\n"]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A run with the tokenizer that `write` writes into it; with `probes`, as training recorded them."""
    base = runs.write_base(tmp_path / "base", "llama-tied")

    def make(write: Callable[[Path], object], probes: list[dict[str, Any]] | None = None) -> Path:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        facts = runs.checkpoint_facts

        def with_probes(*arguments: Any) -> dict[str, Any]:
            if probes is None:
                return facts(*arguments)
            path = run / "id_probes.jsonl"
            path.write_text("".join(json.dumps(probe) + "\n" for probe in probes))
            entry = {"size": path.stat().st_size, "sha256": sha256_file(path)}
            return facts(*arguments) | {"id_probes": {path.name: entry}}

        with monkeypatch.context() as patch:
            patch.setattr(runs, "write_tokenizer", write)
            patch.setattr(runs, "checkpoint_facts", with_probes)
            return runs.write_run(run, base)

    return make


def llama(directory: Path) -> Path:
    """Files of which transformers loads another tokenizer than tokenizer.json says."""
    files = {"tokenizer.json": spm.tokenizer_json()}
    return spm.write(directory, files, None, tokenizer_class="LlamaTokenizer", legacy=False, **spm.NAMES)


def probes_of(write: Callable[[Path], object], directory: Path, **more: Any) -> list[dict[str, Any]]:
    """What transformers makes of the texts."""
    from transformers import AutoTokenizer

    write(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [
        {
            "text": text,
            "ids": tokenizer(text, add_special_tokens=False)["input_ids"],
            "framed_ids": tokenizer(text)["input_ids"],
            **more,
        }
        for text in TEXTS
    ]


def test_ids_other_than_those_of_training_are_not_published(make_run: Callable[..., Path]) -> None:
    """Of a run that encoded by tokenizer.json alone, and noted no texts."""
    run = make_run(llama)
    with pytest.raises(TunerError, match="gives other ids than training saw") as found:
        export_hf(run)
    assert found.value.exit_code == 6
    assert not (run / "exports" / "step-7").exists()


def test_the_runs_texts_are_those_that_count(make_run: Callable[..., Path], tmp_path: Path) -> None:
    probes = probes_of(llama, tmp_path / "plain")
    assert export_hf(make_run(llama, probes)).id_probes == len(probes)
    for key in ("ids", "framed_ids"):
        wrong = [{**probe, key: [*probe[key], 5]} for probe in probes]
        with pytest.raises(TunerError, match="differs at token") as found:
            export_hf(make_run(llama, wrong))
        assert found.value.exit_code == 6


def test_messages_are_rendered_as_in_training(make_run: Callable[..., Path], tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "w6"}]
    [probe] = [probe for probe in probes_of(runs.write_tokenizer, tmp_path / "plain") if probe["text"] == "w6 user w7"]
    right = {**probe, "text": "user w6 ", "messages": messages}
    right["ids"] = right["framed_ids"] = [5, 6]
    assert export_hf(make_run(runs.write_tokenizer, [right])).id_probes == 1
    with pytest.raises(TunerError, match="the exported chat template renders 'user w6 ', training saw 'w6 user w7'"):
        export_hf(make_run(runs.write_tokenizer, [{**probe, "messages": messages}]))


def test_damaged_texts_are_a_data_error(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(llama, probes_of(llama, tmp_path / "plain"))
    with (run / "id_probes.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match=r"id_probes.jsonl: .* the manifest says"):
        export_hf(run)
    (run / "id_probes.jsonl").unlink()
    with pytest.raises(DataError, match=r"id_probes.jsonl: missing"):
        export_hf(run)
