"""Products of compiled functions by oneDNN: the large ones, and only where that pays."""

import os
import platform

import pytest
import torch
from conftest import load, tiny, train
from torch.func import grad_and_value, vmap

SCRIPT = load("td3_continuous_action_torchcompile")
aten = torch.ops.aten


def loss_of(params: dict, x: torch.Tensor) -> torch.Tensor:
    """Two networks on the same rows, as critics are; and a layer with a bias."""
    x = torch.nn.functional.linear(x, params["shared"], params["bias"]).relu()
    y = vmap(lambda first, second: ((x @ first).relu() @ second).relu())(params["first"], params["second"])
    return (y @ params["narrow"]).pow(2).mean()


def test_large_products_of_a_gradient_are_onednns_and_equal(monkeypatch):
    torch.manual_seed(0)
    shapes = {"shared": (96, 80), "bias": (96,), "first": (2, 96, 128), "second": (2, 128, 64), "narrow": (64, 2)}
    params = {name: torch.randn(shape) / 10 for name, shape in shapes.items()}
    x = torch.randn(2048, 80)
    left = []

    class Watched(SCRIPT.ProductsByOneDNN):
        def __call__(self, graph):
            before = [node.target for node in graph.nodes]
            super().__call__(graph)
            found = (aten.mm.default, aten.bmm.default, aten.addmm.default, torch.ops.leanrl.product.default)
            assert {aten.addmm.default, aten.bmm.default, aten.mm.default} <= set(before)
            left.extend((node.target, tuple(node.meta["val"].shape)) for node in graph.nodes if node.target in found)

        def uuid(self):
            return os.urandom(8)  # nothing of an earlier test

    function = grad_and_value(loss_of)
    options = {"cpp_wrapper": True, "post_grad_custom_pre_pass": Watched()}
    compiled = torch.compile(function, fullgraph=True, options=options)
    grads, loss = compiled(params, x)
    expected_grads, expected_loss = function(params, x)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-5)
    products = [shape for target, shape in left if target is torch.ops.leanrl.product.default]
    forward = [(2048, 96), (256, 2048), (2, 2048, 64)]  # the second is the first layer of both networks at once
    backward = [(2, 2048, 128), (2, 128, 64), (256, 96), (2048, 96), (96, 80)]
    assert sorted(products) == sorted(forward + backward)
    assert len(products) < len(left)  # the narrow layer's are too small

    linear = torch.ops.mkldnn._linear_pointwise
    row_by_row = []  # whether the left matrix of each product is: oneDNN would copy it, with one thread

    def watched_linear(a, *rest):
        row_by_row.append(a.is_contiguous())
        return linear(a, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched_linear)
    compiled(params, x)
    assert row_by_row == [True] * 11  # three of the products are of two networks each


def test_a_product_is_right_whatever_lies_where():
    torch.manual_seed(0)
    wide = torch.randn(40, 64)
    for a in (wide[:, :30], wide[:, :30].contiguous(), wide[:30].t()[:40, :30], torch.randn(30, 40).t()):
        for b in (wide[:30, :20], torch.randn(30, 20), torch.randn(20, 30).t()):
            bias = torch.randn(20)
            torch.testing.assert_close(SCRIPT.product(a, b), a @ b, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(SCRIPT.product(a, b, bias), a @ b + bias, rtol=1e-5, atol=1e-5)
            pair = SCRIPT.product(torch.stack([a, -a]), torch.stack([b, b]))
            torch.testing.assert_close(pair, torch.stack([a @ b, -a @ b]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "dtype", "kwargs"), [(200, "float32", {}), (256, "bfloat16", {}), (256, "float32", 0)]
)
def test_other_products_stay(size, dtype, kwargs):
    """Small ones, those of other numbers, and sums with weights."""
    x = torch.randn(size, size, dtype=getattr(torch, dtype))
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    a.meta["val"] = x
    args = (a, a) if kwargs == {} else (a, a, a)
    target = aten.mm.default if kwargs == {} else aten.addmm.default
    node = graph.call_function(target, args, {} if kwargs == {} else {"beta": 2})
    node.meta["val"] = x
    SCRIPT.ProductsByOneDNN()(graph)
    assert node.target is target


TWINS = [f"{name}_torchcompile" for name in ("td3_continuous_action", "sac_continuous_action")]
TWINS += [f"{name}_torchcompile" for name in ("ppo_device_env", "a2c_device_env", "ppo_lru")]
ZEN_5 = {"cpu_name": "AMD EPYC", "avx512_f": True, "avx_vnni": True}
ZEN_4 = ZEN_5 | {"avx_vnni": False}
CPUS = [(ZEN_5, True), (ZEN_4, False), (ZEN_5 | {"cpu_name": "Intel(R) Xeon(R)"}, False), ({}, False)]


@pytest.mark.parametrize(
    ("name", "cpu", "pays"), [(TWINS[0], *case) for case in CPUS] + [(x, ZEN_5, True) for x in TWINS[1:]]
)
def test_it_is_on_where_it_pays(monkeypatch, name, cpu, pays):
    options = []
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: options.append(kwargs["options"]) or f)
    train(monkeypatch, name, **tiny(name), compile=True)
    assert {"post_grad_custom_pre_pass" in of_one for of_one in options} == {pays}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of processors of another make, nothing is asked")
def test_pytorch_tells_the_name_and_the_instructions_of_the_processor():
    cpu = torch.cpu.get_capabilities()
    assert "avx_vnni" not in cpu or "cpu_name" in cpu  # nothing is known where the system tells nothing
