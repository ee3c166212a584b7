"""The grid of ranks, with a name for each axis, built in one place.

Neighbouring ranks differ first in `tp`, whose messages are the most frequent, then in data parallelism, then in the
pipeline stage `pp`, whose messages are the fewest.  Data parallelism is itself a grid of two axes: the ranks of one
`ep` group hold different experts, those of one `edp` group the same; for everything else the two are one axis, `dp`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepseek_lab.parallel.config import ParallelConfig

AXES = ("pp", "edp", "ep", "tp")  # outermost first


@dataclass(frozen=True)
class Mesh:
    """This process's place in the grid, by axis: "pp", "dp", "tp", "edp", "ep", or "world" for all ranks.

    Without a process group there is one rank, every group is None and every size one.  "ends" are the first and the
    last rank of this one's pipeline; for a rank that is neither, and where they are one, its size is one.
    """

    device_mesh: DeviceMesh | None
    sizes: dict[str, int] = field(default_factory=dict)
    ends: dist.ProcessGroup | None = None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along `axis` only."""
        if self.device_mesh is None or axis == "ends":
            return self.ends
        return dist.group.WORLD if axis == "world" else self.device_mesh.get_group(axis)

    def rank(self, axis: str) -> int:
        """This rank's number along `axis`."""
        return 0 if self.device_mesh is None else dist.get_rank(self.group(axis))

    def size(self, axis: str) -> int:
        """How many ranks there are along `axis`."""
        return 1 if self.device_mesh is None else self.sizes[axis]


def build_mesh(config: ParallelConfig, device_type: str) -> Mesh:
    """Lay out the ranks of the default process group, or one rank when there is none.

    Raises:
        ValueError: when the layout does not fit the number of ranks.
    """
    if not dist.is_initialized():
        config.check(1)
        return Mesh(None)
    world = dist.get_world_size()
    config.check(world)
    sizes = config.sizes(world)
    device_mesh = init_device_mesh(device_type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    device_mesh["edp", "ep"]._flatten("dp")
    ends = _ends(device_mesh)
    return Mesh(device_mesh, sizes | {"world": world, "ends": 2 if ends else 1}, ends)


def _ends(device_mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """For the two stages that share a tied table."""
    if device_mesh.mesh.shape[0] == 1:
        return None
    first, last = device_mesh.mesh[0].flatten().tolist(), device_mesh.mesh[-1].flatten().tolist()
    mine, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in zip(first, last, strict=True)])
    return mine if isinstance(mine, dist.ProcessGroup) else None
