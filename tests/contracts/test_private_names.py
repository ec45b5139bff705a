"""Names that torch and transformers do not promise: in the two adapter modules alone, and missed by nobody else."""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.syntax import modules, nodes, trees
from tests.fixtures import forked
from tests.fixtures.tables import cases

ADAPTERS = {"tuner.runtime.torch_private", "tuner.model.transformers_private"}
LIBRARIES = ("torch", "transformers")
# All of transformers that is imported outside its adapter; anything deeper has no promise.
PROMISED = {"transformers", "transformers.utils"}
# Of nn.Module, which subclasses share with it, of peft's layers, of namedtuple, and of the interpreter.
OTHERS = set(cases(__file__, "others"))


def private_parts(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(tree: ast.Module) -> Iterator[str]:
    """Every private name of the two libraries that a module imports or reaches, or that an object of another's has."""
    reached = nodes(tree, ast.Attribute)
    own = {node.name for kind in (ast.FunctionDef, ast.ClassDef) for node in nodes(tree, kind)}
    own |= {node.attr for node in reached if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")}
    for node in reached:
        if private_parts(node.attr) and node.attr not in own | OTHERS:
            yield f"line {node.lineno}: {ast.unparse(node)}"
    imported = [(node.lineno, alias.name) for node in nodes(tree, ast.Import) for alias in node.names]
    for statement in nodes(tree, ast.ImportFrom):
        if (module := statement.module or "").startswith("transformers.") and module not in PROMISED:
            yield f"line {statement.lineno}: {module}"
        imported += [(statement.lineno, f"{module}.{alias.name}") for alias in statement.names]
    yield from (f"line {line}: {name}" for line, name in imported if name.startswith(LIBRARIES) and private_parts(name))


def test_private_names_are_in_the_adapters_alone() -> None:
    assert set(modules()) > ADAPTERS
    found = {module: [*private_names(tree)] for module, tree in trees().items() if module not in ADAPTERS}
    assert {module: names for module, names in found.items() if names} == {}


@pytest.mark.parametrize("line", cases(__file__, "a_private_name_is_seen"))
def test_a_private_name_is_seen(line: str) -> None:
    assert list(private_names(ast.parse(f"def f() -> None:\n    {line}")))
    assert not list(private_names(ast.parse("from torch import nn\nself._names = tuple(x)\ny._names")))


def test_every_name_is_there_with_the_tested_versions() -> None:
    from tuner.model import transformers_private
    from tuner.runtime import torch_private

    for adapter in (torch_private, transformers_private):
        assert all(getattr(adapter, name) is not None for name in adapter.NAMES)
        with pytest.raises(AttributeError):
            getattr(adapter, "another")  # noqa: B009 - as an expression it is said to be useless


def test_the_public_ways_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tuner.runtime.torch_private import divide_, each_norm, softmax_backward

    torch.manual_seed(0)
    scores, upstream = torch.randn(3, 5, 7), torch.randn(3, 5, 7)

    def computed() -> list[torch.Tensor]:
        divided = [scores.clone(), upstream.clone()]
        divide_(divided, torch.tensor(3.0))
        return [*divided, *each_norm(divided), softmax_backward(upstream, scores.softmax(-1))]

    private = computed()
    for name in ("_foreach_norm", "_foreach_div_", "_softmax_backward_data"):
        monkeypatch.delattr(torch, name)
    for one, other in zip(private, computed(), strict=True):
        torch.testing.assert_close(one, other)


# Command lines, one after the other, where torch and transformers have lost every name of the tables, and torch those
# that have a public way beside them.
POORER = f"""
{forked.LOADED_AGAIN}
import json, torch
from tuner.model import transformers_private
from tuner.runtime import torch_private
for name in ("_foreach_norm", "_foreach_div_", "_softmax_backward_data"):
    delattr(torch, name)
for adapter in (torch_private, transformers_private):
    adapter.NAMES = {{name: (f"{{path}}_renamed", *rest) for name, (path, *rest) in adapter.NAMES.items()}}
from tuner.cli.main import main
for words in json.loads(sys.argv[1]):
    print("$", *words, file=sys.stderr, flush=True)
    try:
        main(words)
    except SystemExit as end:
        print("ended with", end.code, file=sys.stderr, flush=True)
"""
RECIPE: Any = cases(__file__, "recipe")


def test_training_goes_on_without_them_and_profile_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.caches import new_cache
    from tests.model.tiny import tiny_config

    monkeypatch.setenv("TUNER_CACHE", str(new_cache(tmp_path / "cache")))
    config = tiny_config("llama")
    config.vocab_size = 300
    config.save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a ", "completion": "b"}\n' * 16)
    (tmp_path / "r.yaml").write_text(RECIPE)

    lines = cases(__file__, "command_lines")
    command = [sys.executable, "-c", POORER, json.dumps(lines)]
    done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    trained, predicted, measured, exported = done.stderr.split("$ ")[1:]
    assert "done      2 steps" in trained and trained.endswith("ended with 0\n"), trained
    assert "the recording could not be written" in trained and "torch._C._profiler" in trained
    for text, path in (
        (predicted, "torch.utils._python_dispatch.TorchDispatchMode"), (measured, "torch._C._profiler._EventType"),
        (exported, "transformers.core_model_loading.revert_weight_conversion"),
    ):  # fmt: skip
        assert f"has no {path}_renamed, which" in text and "training works without it" in text, text
        assert "docs/versions.md" in text and text.endswith("ended with 4\n"), text
