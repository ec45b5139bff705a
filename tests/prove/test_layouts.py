"""Layouts by name, and the one that a recipe asks for."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.tables import cases
from tuner.config.recipe import ParallelSection
from tuner.errors import RecipeError
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.prove.layouts import ALONE, KNOWN, MOST, Layout, layouts_of, own_layout, parse

SIZES = st.integers(1, 5)


def mesh_of(layout: Layout, rank: int = 0) -> Mesh:
    sizes = (layout.section[key] for key in ("shard", "tensor", "sequence", "expert", "replicas"))
    return Mesh.of(layout.rank_info(rank), MeshSpec(*sizes))


@given(SIZES, SIZES, SIZES, SIZES, SIZES, st.booleans())
def test_a_name_says_all_of_a_layout(
    replicas: int, shards: int, tensor: int, sequence: int, expert: int, whole: bool
) -> None:
    layout = Layout(1 if whole else replicas, shards, tensor, sequence, expert, whole)
    assert parse(layout.name) == layout


@pytest.mark.parametrize("name", KNOWN)
def test_known_layouts_are_few_processes_that_make_a_mesh(name: str) -> None:
    layout = parse(name)
    assert layout.name == name and 1 < layout.processes <= MOST
    mesh = mesh_of(layout)
    assert (mesh.size, mesh.data_size) == (layout.processes, layout.data_size)
    assert (mesh.tensor, mesh.sequence, mesh.expert) == (layout.tensor, layout.sequence, layout.expert)
    assert mesh.copies == (layout.shards if layout.whole else layout.replicas)


@pytest.mark.parametrize("name", ["", "fsdp", "tp0", "fsdp2+fsdp4", "none2+fsdp2", "none2+hsdp2x2", "pp2", "tp2 sp2"])
def test_what_is_no_layout_is_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="--layouts"):
        parse(name)


@pytest.mark.parametrize(("section", "name"), cases(__file__, "the_recipes_own_layout_comes_first_and_each_once"))
def test_the_recipes_own_layout_comes_first_and_each_once(section: dict[str, Any], name: str | None) -> None:
    parallel = ParallelSection(**section)
    own = own_layout(parallel)
    assert (None if own is None else own.name) == name
    names = [layout.name for layout in layouts_of(parallel, [])]
    assert names[0] == (name or KNOWN[0]) and len(set(names)) == len(names) and set(KNOWN) <= set(names)
    assert [layout.name for layout in layouts_of(parallel, ["sp2", "tp2", "sp2"])] == ["sp2", "tp2"]


def test_one_process_is_no_mesh() -> None:
    assert ALONE.processes == 1 and mesh_of(ALONE) == Mesh()
