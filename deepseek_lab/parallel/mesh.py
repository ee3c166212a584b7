"""The grid of ranks, with a name for each axis, built in one place."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deepseek_lab.parallel.config import ParallelConfig


@dataclass(frozen=True)
class Mesh:
    """This process's place in the grid.  Without a process group there is one rank, and `dp_group` is None."""

    device_mesh: DeviceMesh | None

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        return self.device_mesh.get_group("dp") if self.device_mesh is not None else None

    @property
    def dp_rank(self) -> int:
        return self.device_mesh.get_local_rank("dp") if self.device_mesh is not None else 0

    @property
    def dp_size(self) -> int:
        return self.device_mesh.size() if self.device_mesh is not None else 1


def build_mesh(config: ParallelConfig, device_type: str) -> Mesh:
    """Lay out the ranks of the default process group, or one rank when there is none.

    Raises:
        ValueError: when the layout does not fit the number of ranks.
    """
    if not dist.is_initialized():
        config.check(1)
        return Mesh(None)
    config.check(dist.get_world_size())
    return Mesh(init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("dp",)))
