"""What an H100 would run of the twins, found without one by benchmark/lower.py: the predictions of the notebook."""

import lower
import pytest
import torch
from catalog import row
from results import tables

SMALL = ("dqn",)  # the others: ./run.sh test --long
LOWERED = {table["script"]: table["rows"] for table in tables("lowered")}


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is of another version of the compiler")
@pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")  # HalfCheetah-v4
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.long] * (x not in SMALL)) for x in LOWERED])
def test_a_twin_becomes_the_machine_code_that_the_page_predicts(name):
    pytest.importorskip("triton")
    rows = [lower.lower(graph) for graph in lower.record(f"{name}_torchcompile")]
    assert len(rows) == row(name).graphs
    for found, published in zip(rows, LOWERED[name], strict=True):
        counts = ("function", "kernels", "launches", "products", "fallbacks", "bytes", "spilled")
        assert {key: found[key] for key in counts} == {key: published[key] for key in counts}


def test_no_kernel_spills_and_every_twin_is_there():
    assert set(LOWERED) == set(lower.EVERY)
    assert not any(found["spilled"] for rows in LOWERED.values() for found in rows)
