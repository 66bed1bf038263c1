"""identity_conv.export: what the graph holds, and how it is kept."""

from __future__ import annotations

import io

import pytest
import torch
from torch.export import Dim

import identity_conv

DYNAMIC = ({0: Dim("n", max=64), 2: Dim("h", min=1, max=512), 3: Dim("w", min=1, max=512)},)


def targets(program: torch.export.ExportedProgram) -> list[object]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dynamic_shapes", [None, DYNAMIC], ids=["static", "dynamic"])
def test_the_graph_holds_the_class_call_and_the_operator(device: str, dynamic_shapes) -> None:
    x = torch.randn(2, 3, 8, 9, device=device)
    program = identity_conv.export(identity_conv.IdentityModel().to(device), (x,), dynamic_shapes=dynamic_shapes)
    assert torch.ops.higher_order.call_torchbind in targets(program)
    assert torch.ops.my_ops.identity_conv_op.default in targets(program)


def test_dynamic_sizes_stay_free() -> None:
    model = identity_conv.IdentityModel()
    program = identity_conv.export(model, (torch.randn(2, 3, 8, 9),), dynamic_shapes=DYNAMIC)
    for shape in [(1, 3, 5, 7), (5, 3, 2, 300), (64, 3, 1, 1)]:
        x = torch.randn(shape)
        assert torch.equal(program.module()(x), x)


def test_static_sizes_are_checked() -> None:
    program = identity_conv.export(identity_conv.IdentityModel(), (torch.randn(2, 3, 8, 8),))
    with pytest.raises(Exception, match=r"shape|Guard failed: x.size\(\)\[0\] == 2"):
        program.module()(torch.randn(3, 3, 8, 8))


def test_a_program_with_a_class_is_saved_and_loaded(device: str) -> None:
    x = torch.randn(2, 3, 4, 4, device=device)
    program = identity_conv.export(identity_conv.IdentityModel().to(device), (x,), dynamic_shapes=DYNAMIC)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert targets(loaded) == targets(program)
    torch.testing.assert_close(loaded.module()(x), x, rtol=0, atol=4e-3 if device == "cuda" else 0)


def test_keyword_and_nested_arguments() -> None:
    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = identity_conv.IdentityModel()

        def forward(self, pair, *, scale):
            return {"sum": self.inner(pair["a"]) + self.inner(pair["b"]), "scaled": self.inner(pair["a"]) * scale}

    a, b, scale = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.tensor(3.0)
    program = identity_conv.export(Nested(), ({"a": a, "b": b},), {"scale": scale})
    result = program.module()({"a": a, "b": b}, scale=scale)
    assert torch.equal(result["sum"], a + b)
    assert torch.equal(result["scaled"], a * 3)


def test_args_must_be_a_tuple() -> None:
    with pytest.raises(TypeError, match="export: args must be a tuple of the model's positional arguments, got Tensor"):
        identity_conv.export(identity_conv.IdentityModel(), torch.randn(2, 3, 4, 4))
