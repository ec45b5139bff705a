"""The mesh: the processes of a launch laid out along named axes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tuner.errors import MachineError
from tuner.runtime.dist import RankInfo


@dataclass(frozen=True)
class MeshSpec:
    """How a recipe lays processes out: `parallel.shard` resolved (`full`, `hybrid` or `none`), and three sizes."""

    shard: str
    tensor: int = 1
    """Processes that split each matrix of a layer between them."""
    sequence: int = 1
    """Processes that split each row between them."""
    expert: int = 1
    """Processes that have the experts of each layer between them."""
    replicas: int | None = None
    """Copies of the model with `hybrid`; None: one on each machine."""
    on_host: bool = False
    """Whether shards lie in the host's memory: then there are shards, if only one."""


@dataclass(frozen=True)
class DeviceMeshes:
    """The axes as torch has them, each None where the launch has none of it."""

    weights: DeviceMesh | None = None
    """``replicate`` and ``shard``, or the latter alone: what FSDP2 shards over."""
    tensor: DeviceMesh | None = None
    sequence: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    expert_weights: DeviceMesh | None = None
    """What FSDP2 shards the experts of one process over: ``expert_replicate`` and ``expert_shard``, or the latter."""
    data_mesh: DeviceMesh | None = None
    """Where processes compute layers together: those that compute the same part of each."""


@dataclass(frozen=True)
class Mesh:
    """The axes of a launch, outermost first, and this process's rank in it; without axes, a single process.

    ``replicate``: copies of the model. ``shard``: the processes that hold one copy between them, as shards that FSDP2
    gathers; without it each holds one. ``tensor``: processes that compute each layer together, on the same rows.
    Neighbouring ranks differ along the last axis: launchers number the processes of a machine one after the other.

    Two sizes divide the processes that hold weights, which are all those of the first two axes, into groups of
    neighbours. Those of a ``sequence`` group compute the same rows, each a share of the positions. Those of an
    ``expert`` group compute other rows and send tokens to whichever of them has the expert.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    """Size by name, above 1; where shards lie in the host's memory, of ``shard`` also 1."""
    rank: int = 0
    sequence: int = 1
    expert: int = 1

    @classmethod
    def of(cls, rank_info: RankInfo, spec: MeshSpec) -> "Mesh":
        """The mesh that a recipe makes of a launch.

        Raises MachineError where the processes do not divide into what it asks for.
        """
        world_size, local, tensor = rank_info.world_size, rank_info.local_world_size, spec.tensor
        if world_size == 1 and tensor * spec.sequence * spec.expert == 1:
            return cls({"shard": 1} if spec.on_host else {})
        _require_divided(world_size, spec)
        there = world_size // tensor
        if spec.shard == "hybrid" and there % (spec.replicas or 1):
            raise MachineError(
                f"parallel.replicas: {spec.replicas} copies cannot have {there} processes between them in equal parts",
                hint=f"write a number that divides {there}",
            )
        if spec.shard == "hybrid" and spec.replicas is None and (world_size % local or local % tensor):
            group = f", or these not of parallel.tensor: {tensor}" if tensor > 1 else ""
            raise MachineError(
                f"parallel.shard: hybrid needs as many processes on every machine; {world_size} are not a "
                f"multiple of the {local} here{group}",
                hint="write shard: full",
            )
        hybrid = local // tensor if spec.replicas is None else there // spec.replicas
        size = {"none": 1, "full": there, "hybrid": hybrid}[spec.shard]
        if spec.shard != "none":
            _require_inside(size, spec)
        axes = {"replicate": there // size, "shard": size, "tensor": tensor}
        axes = {name: count for name, count in axes.items() if count > 1 or (name == "shard" and spec.on_host)}
        return cls(axes, rank_info.rank, spec.sequence, spec.expert)

    @property
    def size(self) -> int:
        """All processes."""
        return prod(self.axes.values())

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold parts of the model."""
        return "shard" in self.axes or "tensor" in self.axes

    @property
    def tensor(self) -> int:
        """How many processes compute each layer together."""
        return self.axes.get("tensor", 1)

    @property
    def weight_size(self) -> int:
        """Processes that hold weights: all of them, those of one ``tensor`` group counted once."""
        return self.size // self.tensor

    @property
    def weight_rank(self) -> int:
        """Which of them this is; random numbers go by it: a ``tensor`` group draws the same ones."""
        return self.rank // self.tensor

    @property
    def data_size(self) -> int:
        """Into how many parts the rows of a global batch are divided."""
        return self.weight_size // self.sequence

    @property
    def data_rank(self) -> int:
        """Which part of them this process computes, below :attr:`data_size`."""
        return self.weight_rank // self.sequence

    @property
    def row_holders(self) -> int:
        """How many processes compute the same rows."""
        return self.tensor * self.sequence

    @property
    def copies(self) -> int:
        """How many processes hold the same shard of a gradient that FSDP2 has reduced."""
        return self.axes.get("replicate", 1)

    def index(self, axis: str) -> int:
        """Where this process is along an axis: 0 along one that the mesh does not have."""
        names = list(self.axes)
        if axis not in names:
            return 0
        inner = prod(self.axes[name] for name in names[names.index(axis) + 1 :])
        return self.rank // inner % self.axes[axis]

    def device_meshes(self, device: str, prefix: str = "") -> DeviceMeshes:
        """The axes as torch has them, for a kind of device, their names after a ``prefix``. Collective."""
        if not self.is_sharded and self.sequence == 1:
            return DeviceMeshes()  # each process holds the whole model, and computes rows of its own
        names = tuple(self.axes)
        whole = init_device_mesh(device, tuple(self.axes.values()), mesh_dim_names=tuple(prefix + n for n in names))
        over = [prefix + name for name in ("replicate", "shard") if name in names]
        weights = whole[tuple(over)] if "shard" in names else None
        tensor = whole[prefix + "tensor"] if "tensor" in names else None
        data_mesh = whole[tuple(over)] if over and tensor is not None else None
        sequence = expert = expert_weights = None
        if self.sequence > 1:
            sizes = {"rows": self.data_size, "sequence": self.sequence, "row_tensor": self.tensor}
            sequence = _mesh(device, sizes, prefix)[prefix + "sequence"]
        if self.expert > 1:
            sizes = {"expert_replicate": self.copies, "expert_shard": self.axes["shard"] // self.expert}
            experts = _mesh(device, {**sizes, "expert": self.expert, "expert_tensor": self.tensor}, prefix)
            expert = experts[prefix + "expert"]
            inner = ("expert_replicate", "expert_shard") if self.copies > 1 else ("expert_shard",)
            expert_weights = experts[tuple(prefix + name for name in inner)]
        return DeviceMeshes(weights, tensor, sequence, expert, expert_weights, data_mesh)


def inner_axes(mesh: DeviceMesh) -> list[int]:
    """The axes of a parameter's mesh over which layers or experts are split; the outer ones are FSDP2's."""
    names = mesh.mesh_dim_names or ()
    return [axis for axis, name in enumerate(names) if not name.endswith(("replicate", "shard"))]


@cache
def mesh_on(kind: str, mesh: DeviceMesh) -> DeviceMesh:
    """The same processes with the same groups, for tensors on a kind of device: on another's, torch would move them."""
    if kind in {mesh.device_type, "meta"}:
        return mesh
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], kind, mesh_dim_names=mesh.mesh_dim_names)
    return DeviceMesh.from_group(groups, kind, mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def _mesh(device: str, sizes: Mapping[str, int], prefix: str) -> DeviceMesh:
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(prefix + name for name in sizes))


def _require_divided(world_size: int, spec: MeshSpec) -> None:
    """Raise MachineError, with numbers that would do, where the processes do not divide into these groups."""
    groups = {"tensor": 1, "sequence": spec.sequence, "expert": spec.expert}
    for key, group in ((key, spec.tensor * size) for key, size in groups.items()):
        if world_size % group:
            what = f"parallel.{key}: {getattr(spec, key)}"
            times = f" times parallel.tensor: {spec.tensor}" if key != "tensor" and spec.tensor > 1 else ""
            raise MachineError(
                f"{what}{times} does not divide the number of processes, {world_size}",
                hint=f"start a multiple of {group} processes (parallel.processes, or the launcher's number)",
            )


def _require_inside(shards: int, spec: MeshSpec) -> None:
    """Raise MachineError where a group would reach over several copies of the model."""
    for key in ("sequence", "expert"):
        size = getattr(spec, key)
        if shards % size:
            raise MachineError(
                f"parallel.{key}: {size} does not divide the {shards} processes that hold one copy of the model "
                f"(parallel.shard: {spec.shard})",
                hint="write shard: full" if spec.shard == "hybrid" else f"write a number that divides {shards}",
            )
