"""Products of compiled functions by oneDNN: the large ones, and only where that pays."""

import os

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


def test_large_products_of_a_gradient_are_onednns_and_equal():
    torch.manual_seed(0)
    shapes = {"shared": (96, 80), "bias": (96,), "first": (2, 96, 128), "second": (2, 128, 64), "narrow": (64, 2)}
    params = {name: torch.randn(shape) / 10 for name, shape in shapes.items()}
    x = torch.randn(256, 80)
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
    grads, loss = torch.compile(function, fullgraph=True, options=options)(params, x)
    expected_grads, expected_loss = function(params, x)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-5)
    products = [shape for target, shape in left if target is torch.ops.leanrl.product.default]
    forward = [(256, 96), (256, 256), (2, 256, 64)]  # the second is the first layer of both networks at once
    backward = [(2, 256, 128), (2, 128, 64), (256, 96), (256, 96), (96, 80)]
    assert sorted(products) == sorted(forward + backward)
    assert len(products) < len(left)  # the narrow layer's are too small


@pytest.mark.parametrize(
    ("cpu", "pays"),
    [
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, True),
        ({"cpu_name": "AMD EPYC", "avx512_f": False}, False),
        ({"cpu_name": "Intel(R) Xeon(R) Processor", "avx512_f": True}, False),
        ({}, False),  # of another make
    ],
)
def test_it_is_on_where_amd_has_avx512(monkeypatch, cpu, pays):
    options = []
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: options.append(kwargs["options"]) or f)
    train(monkeypatch, SCRIPT.__name__, **tiny(SCRIPT.__name__), compile=True)
    assert {"post_grad_custom_pre_pass" in of_one for of_one in options} == {pays}
