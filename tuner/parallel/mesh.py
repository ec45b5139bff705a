"""The mesh: the processes of a launch laid out along named axes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tuner.errors import MachineError
from tuner.runtime.dist import RankInfo

DATA_AXES = ("replicate", "shard")
"""Processes that differ along one of these compute other rows; along any other axis they share theirs."""


@dataclass(frozen=True)
class Mesh:
    """The axes of a launch, outermost first, and this process's rank in it; without axes, a single process.

    ``shard``: the processes that hold one copy of the model between them; without it each holds one. ``replicate``: the
    copies. Neighbouring ranks differ along the last axis, since launchers number the processes of a machine one after
    the other.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    """Size by name."""
    rank: int = 0

    @classmethod
    def of(cls, rank_info: RankInfo, shard: str) -> "Mesh":
        """The mesh that `parallel.shard` makes of a launch: `full`, `hybrid` or `none`.

        Raises MachineError where `hybrid` meets machines with unequal numbers of processes.
        """
        world_size, local = rank_info.world_size, rank_info.local_world_size
        if world_size == 1:
            return cls()
        if shard == "hybrid" and world_size % local:
            raise MachineError(
                f"parallel.shard: hybrid needs as many processes on every machine; {world_size} are not a "
                f"multiple of the {local} here",
                hint="write shard: full",
            )
        size = {"none": 1, "full": world_size, "hybrid": local}[shard]
        axes = {"replicate": world_size // size, "shard": size}
        return cls({name: count for name, count in axes.items() if count > 1}, rank_info.rank)

    @property
    def size(self) -> int:
        """All processes."""
        return prod(self.axes.values())

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold parts of the model."""
        return "shard" in self.axes

    @property
    def data_size(self) -> int:
        """Into how many parts the rows of a global batch are divided."""
        return prod(self.axes.get(name, 1) for name in DATA_AXES)

    @property
    def data_rank(self) -> int:
        """Which part of them this process computes, below :attr:`data_size`; its random numbers go by it too."""
        rank = 0
        for name in DATA_AXES:
            rank = rank * self.axes.get(name, 1) + self.index(name)
        return rank

    @property
    def copies(self) -> int:
        """How many processes hold the same shard of a gradient once it is reduced.

        A sum over all processes counts each shard so often. Divided by it, a sum of squares is that of the whole
        gradient, to the last bit where it is a power of two, since all replicas hold the same values.
        """
        return self.axes.get("replicate", 1)

    def index(self, axis: str) -> int:
        """Where this process is along an axis: 0 along one that the mesh does not have."""
        names = list(self.axes)
        if axis not in names:
            return 0
        inner = prod(self.axes[name] for name in names[names.index(axis) + 1 :])
        return self.rank // inner % self.axes[axis]

    def device_mesh(self, device: str) -> DeviceMesh | None:
        """The axes as torch has them, for a kind of device; None where every process holds the whole model. Collective.

        All of them shard and replicate parameters; an axis that does something else is to be sliced off here.
        """
        if not self.is_sharded:
            return None
        return init_device_mesh(device, tuple(self.axes.values()), mesh_dim_names=tuple(self.axes))
