"""Shows without a GPU that code on tensors never leaves the device and never waits for it.

    with OneDevice("meta"):
        iterate(...)  # with tensors on the device "meta"

A tensor on "meta" has a shape and no numbers, so whatever needs one on the host raises: item(), float(), a condition,
tolist(), numpy(), nonzero(), a boolean mask as index. OneDevice raises for what "meta" lets pass: tensors of several
devices in one operation, a tensor made on the CPU because nobody said where, copies between devices, copies of numbers
from the host, and assignment by a boolean mask. Copy this file to your own tests.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoNumbersOfTheHost(TorchFunctionMode):
    """Refuses tensors made of the host's numbers: a GPU copies them, which no operation on "meta" shows."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.Tensor.new_tensor):
            raise RuntimeError(f"{function.__name__}() copies numbers from the host")
        return function(*args, **(kwargs or {}))


class OneDevice(TorchDispatchMode):
    """Refuses every operation that touches a tensor of another device, or that indexes with booleans."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device
        self.count = 0  # of the operations so far
        self.no_numbers = NoNumbersOfTheHost()

    def __enter__(self):
        self.no_numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.no_numbers.__exit__(*error)

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
