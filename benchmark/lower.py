"""Lowers what the twins compile to machine code for an H100, without a GPU, and counts what such a GPU would run.

    python benchmark/lower.py                                # all twins, into runs/benchmark/lowered.json
    python benchmark/lower.py dqn sac_continuous_action      # these

A twin trains here, on the CPU and at its own sizes, until it has compiled all that it compiles. The graphs that
AOTAutograd makes of it move to a pretended GPU of compute capability 9.0. Inductor writes Triton kernels for it, and
the ptxas that comes with Triton makes machine code of them. Nothing is run. Needs triton, and no GPU.
"""

import copy
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch._inductor.scheduler
import torch.utils._triton
import tyro
from catalog import CATALOG
from functorch.compile import make_boxed_func
from results import RUNS, keep, machine
from torch._inductor import compile_fx, graph
from torch._inductor import config as inductor_config
from torch._inductor.dependencies import MemoryDep
from torch._inductor.ir import MultiOutputLayout
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA = torch.device("cuda", 0)
BANDWIDTH = 3.35e12  # bytes a second, of an H100 SXM
H100 = SimpleNamespace(  # what Inductor asks about the device
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
    uuid="0",
    gcnArchName="",
)
EVERY = tuple(name for name in CATALOG if "_ray" not in name and "multigpu" not in name)
SHORT = {"learning_starts": 1000, "total_timesteps": 1040, "update_epochs": 1}  # enough for an update of each kind


class Graph(NamedTuple):
    """What AOTAutograd hands to Inductor."""

    function: str  # that was compiled
    module: torch.fx.GraphModule
    inputs: list  # of a tensor its shape, stride and dtype
    settings: dict  # of Inductor, for this graph
    options: dict  # of torch.compile


def record(name: str, **flags) -> list[Graph]:
    """Trains a twin for moments, and returns the graphs of all that it compiles."""
    script = importlib.import_module(name)
    torch._dynamo.reset()  # what another twin has compiled must not lend its shapes
    real_compile = torch.compile
    graphs = []

    def fake_compile(function, *, options: dict | None = None, **settings):
        named = function.func if isinstance(function, partial) else function
        label = "piece" if isinstance(named, torch.fx.GraphModule) else named.__name__

        def backend(module, inputs):
            def inner(aten, examples, **inner_settings):
                shapes = [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in examples]
                graphs.append(Graph(label, copy.deepcopy(aten), shapes, inner_settings, options or {}))
                return make_boxed_func(aten.forward)

            ours = {key: value for key, value in (options or {}).items() if key == "fallback_random"}
            ours["force_disable_caches"] = True
            return compile_fx.compile_fx(module, inputs, inner_compile=inner, config_patches=ours)

        guards = {key: value for key, value in (options or {}).items() if key == "guard_filter_fn"}
        return real_compile(function, backend=backend, options=guards or None, **settings)

    sizes = {key: value for key, value in SHORT.items() if hasattr(script.Args, key)} | flags
    args = script.Args(compile=True, cuda=False, save_model=False, **sizes)
    if hasattr(args, "num_updates"):
        args.num_updates = args.policy_frequency
        args.num_envs = 1024  # the defaults on a GPU
        args.batch_size = 32_768
        args.total_timesteps = (args.num_steps + 1) * args.num_envs
    elif hasattr(args, "num_steps"):
        args.num_envs = args.num_envs or 4096  # the default on a GPU
        args.total_timesteps = args.num_steps * args.num_envs
    folder = os.getcwd()
    with tempfile.TemporaryDirectory() as runs, mock.patch.object(torch, "compile", fake_compile):
        os.chdir(runs)
        try:
            script.train(args)
        finally:
            os.chdir(folder)
    return graphs


@contextmanager
def pretended_gpu(binaries: list):
    """Answers all that Inductor and Triton ask about a GPU; the kernels' binaries are appended to the list."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget

    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: H100,
        "get_device_capability": lambda device=None: (H100.major, H100.minor),
        "get_device_name": lambda device=None: H100.name,
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda device=None: (H100.total_memory, H100.total_memory),
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "_lazy_init": lambda: None,
    }
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: CUDA,
        is_active=lambda: True,
    )
    tuner = triton_heuristics.CachingAutotuner
    compile_config = tuner._precompile_config

    def spied(self, config):
        result = compile_config(self, config)
        binaries.append((self.inductor_meta["kernel_name"], result.kernel.asm["cubin"]))
        return result

    with ExitStack() as stack:

        def answer(where, name, value, **how):
            stack.enter_context(mock.patch.object(where, name, value, **how))

        for name, value in answers.items():
            answer(torch.cuda, name, value)
        for name in ("get_device_properties", "current_device", "device_count", "is_bf16_supported"):
            answer(CudaInterface, name, staticmethod(answers[name]))
        answer(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True)
        answer(torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None)
        answer(torch.Tensor, "copy_", lambda x, *rest: torch.ops.aten.copy_(x, *rest))  # the method asks for a true GPU
        answer(triton.runtime.driver, "_active", driver)
        for module in (torch._inductor.scheduler, torch.utils._triton):
            answer(module, "has_triton", lambda *_: True, create=True)
        answer(compile_fx, "get_cuda_device_context", lambda module: nullcontext())
        answer(triton_helpers, "set_driver_to_gpu", lambda: None)
        answer(tuner, "precompile", lambda self, *_, **__: self._precompile_worker())
        answer(tuner, "_precompile_config", spied)
        yield


def moved(x):
    """A device in the arguments of a graph's node, on the pretended GPU."""
    return CUDA if isinstance(x, torch.device) and x.type == "cpu" else x


def on_gpu(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with all that it makes on the pretended GPU."""
    for node in module.graph.nodes:
        node.args = torch.utils._pytree.tree_map(moved, node.args)
        node.kwargs = torch.utils._pytree.tree_map(moved, dict(node.kwargs))
        node.meta.pop("val", None)
        node.meta.pop("example_value", None)
    module.recompile()
    return module


def bytes_moved(lowered: graph.GraphLowering) -> int:
    """What kernels and products read and write, each tensor once per kernel; of a gather, the rows that it takes."""
    total = 0
    several = {buffer.get_name() for buffer in lowered.buffers if isinstance(buffer.layout, MultiOutputLayout)}
    for node in lowered.scheduler.nodes:
        for dep in [*node.read_writes.reads, *node.read_writes.writes]:
            if dep.name in lowered.removed_buffers | several:  # in registers, or a tuple, whose parts are counted
                continue
            elements = int(lowered.get_numel(dep.name))
            if isinstance(dep, MemoryDep):
                used = (
                    size for name, size in dep.ranges.items() if dep.is_indirect() or name in dep.index.free_symbols
                )
                elements = min(elements, int(math.prod(used)))
            elif not node.is_extern():  # it only says what comes first
                continue
            total += elements * lowered.get_dtype(dep.name).itemsize
    return total


def lower(recorded: Graph) -> dict:
    """Compiles a graph for the pretended GPU, and counts: see the columns of the page."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    codes, sizes, binaries = [], [], []
    compile_to_module = graph.GraphLowering.compile_to_module

    def counted(self):
        result = compile_to_module(self)
        sizes.append(bytes_moved(self))
        return result

    options = {key: value for key, value in recorded.options.items() if key == "fallback_random"}
    options |= {"compile_threads": 1, "force_disable_caches": True, "use_static_triton_launcher": False}
    kept = ("is_inference", "static_input_idxs")
    settings = {key: value for key, value in recorded.settings.items() if key in kept}
    mode = FakeTensorMode()
    with pretended_gpu(binaries), tracing(TracingContext(mode)), ExitStack() as stack:
        module = on_gpu(recorded.module)
        with mode:
            inputs = [
                torch.empty_strided(*x[:2], dtype=x[2], device=CUDA) if isinstance(x, tuple) else x
                for x in recorded.inputs
            ]
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
        stack.enter_context(mock.patch.object(graph.GraphLowering, "save_output_code", codes.append))
        stack.enter_context(mock.patch.object(graph.GraphLowering, "compile_to_module", counted))
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(inductor_config.patch(options))
        compile_fx.compile_fx_inner(module, inputs, **settings)
    [code], [size] = codes, sizes
    called = code[code.index("def call(") :]
    products = re.findall(r"extern_kernels\.(\w+)\(", called)
    fallbacks = re.findall(r"torch\.ops\.(\w+\.\w+)[.\w]*\(", called)
    usage = {}
    for name, cubin in binaries:  # of several configurations, the one that spills least
        usage[name] = min(usage.get(name, (1 << 20, 0)), resources(cubin))
    return {
        "function": recorded.function,
        "kernels": len(usage),
        "launches": called.count(".run(") + len(products) + len(fallbacks),
        "products": len(products),
        "fallbacks": sorted(set(fallbacks)),
        "bytes": size,
        "microseconds": 1e6 * size / BANDWIDTH,
        "registers": max((registers for _, registers in usage.values()), default=0),
        "spilled": sum(spilled for spilled, _ in usage.values()),
    }


def resources(cubin: bytes) -> tuple[int, int]:
    """Bytes of local memory, into which registers spill, and registers of a kernel's thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, local = (max(map(int, re.findall(rf"{word}:(\d+)", said))) for word in ("REG", "LOCAL"))
    return local, registers


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[str, ...]] = EVERY  # whose twins
    out: Path = RUNS  # where the table goes


def main(args: Args):
    for script in args.scripts:
        rows = [lower(recorded) for recorded in record(f"{script}_torchcompile")]
        print(*(json.dumps({"script": script} | row) for row in rows), sep="\n", flush=True)
        keep(args.out, "lowered", {"script": script, "machine": machine(), "rows": rows})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "leanrl"))
    main(tyro.cli(Args))
