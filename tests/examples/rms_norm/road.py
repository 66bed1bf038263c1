"""rms_norm the whole road: an input that the model writes into, and one that is None, in Python and without."""

import shutil
import subprocess
import sys
from pathlib import Path

import rms_norm
import torch

import identity_conv as ic


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(16))

    def forward(self, x, residual):
        return rms_norm.ops.rms_norm(x, residual, self.weight)


class Layers(torch.nn.Module):
    """Two blocks: without a residual the first starts one, which the second writes into."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x, residual=None):
        y, _ = self.first(x, residual)
        residual = x.clone() if residual is None else residual
        y, inverse_rms = self.second(y, residual)
        return y, inverse_rms, residual


device = "cuda" if torch.cuda.is_available() else "cpu"
x, residual = torch.randn(4, 16, device=device), torch.randn(4, 16, device=device)
n = torch.export.Dim("n", min=1, max=1024)
program = shutil.which("identity-conv-run") or Path(sys.executable).with_name("identity-conv-run")

for model, inputs in ((Block(), (x, residual)), (Layers(), (x, None))):
    model = model.to(device).requires_grad_(False)
    free = tuple(None if each is None else {0: n} for each in inputs)
    package = ic.compile_package(ic.export(model, inputs, dynamic_shapes=free), f"{type(model).__name__}.pt2")
    given, written = ([None if each is None else each.clone() for each in inputs] for _ in range(2))
    expected, outputs = model(*given), ic.load_package(package)(*written)
    pairs = [pair for pair in zip((*expected, *given), (*outputs, *written), strict=True) if pair[0] is not None]
    print(package, "in Python:", "equal" if all(torch.allclose(*pair) for pair in pairs) else "DIFFERENT")
    torch.save([each for each in inputs if each is not None], "inputs.pt")  # no tensor stands for None
    subprocess.run([program, package, "--input", "inputs.pt", "--output", "outputs.pt"], check=True)
    outputs = [each.to(device) for each in torch.load("outputs.pt")]
    print(package, "without Python:", "equal" if all(map(torch.allclose, outputs, expected)) else "DIFFERENT")
