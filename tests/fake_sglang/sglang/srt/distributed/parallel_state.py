"""Process groups in pairs, one for the device and one for the host."""

from __future__ import annotations

import torch
import torch.distributed


class GroupCoordinator:
    def __init__(self, group_ranks: list[list[int]], local_rank: int, group_name: str | None = None) -> None:
        self.unique_name = f"{group_name}:0"
        for ranks in group_ranks:
            device_group = torch.distributed.new_group(ranks, backend="gloo")
            cpu_group = torch.distributed.new_group(ranks, backend="gloo")
            if torch.distributed.get_rank() in ranks:
                self.ranks = ranks
                self.device_group = device_group
                self.cpu_group = cpu_group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if len(self.ranks) > 1:
            torch.distributed.all_reduce(tensor, group=self.device_group)
        return tensor
