"""Shows without a GPU that code on tensors never leaves the device and never waits for it.

    with torch.device("meta"), OneDevice("meta"):
        iterate(...)  # with tensors on the device "meta"

A tensor on "meta" has a shape and no numbers, so whatever needs one on the host raises: item(), float(), a condition,
tolist(), numpy(), nonzero(), a boolean mask as index. OneDevice raises for what "meta" lets pass: tensors of several
devices in one operation, copies between devices, and assignment by a boolean mask. Copy this file to your own tests.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OneDevice(TorchDispatchMode):
    """Refuses every operation that touches a tensor of another device, or that indexes with booleans."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device
        self.count = 0  # of the operations so far

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        devices = {x.device.type for x in tensors}
        if devices - {self.device}:
            raise RuntimeError(f"{function} touches {sorted(devices)}")
        is_index = "index" in function._schema.name
        if is_index and any(x.dtype == torch.bool for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)):
            raise RuntimeError(f"{function} by a boolean mask: the host waits for the number of its elements")
        self.count += 1
        return result
