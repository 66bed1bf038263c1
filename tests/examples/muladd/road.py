"""muladd the whole road: a model that was trained with it, model.pt2, Python, and the program without Python."""

import shutil
import subprocess
import sys
from pathlib import Path

import muladd
import torch

import identity_conv as ic


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return muladd.ops.muladd(x, self.scale, 2.0)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model, x = Model().to(device), torch.randn(4, 8, device=device)
wanted, optimizer = 3 * x + 2, torch.optim.SGD(model.parameters(), lr=1.0)
for _ in range(100):
    optimizer.zero_grad()
    (model(x) - wanted).square().mean().backward()
    optimizer.step()
print("trained:", "equal" if torch.allclose(model(x), wanted, atol=0.1) else "DIFFERENT")

n = torch.export.Dim("n", min=1, max=1024)
package = ic.compile_package(ic.export(model, (x,), dynamic_shapes=({0: n},)), "model.pt2")
print(package, "in Python:", "equal" if torch.equal(ic.load_package(package)(x), model(x)) else "DIFFERENT")

torch.save(x, "x.pt")
program = shutil.which("identity-conv-run") or Path(sys.executable).with_name("identity-conv-run")
subprocess.run([program, package, "--input", "x.pt", "--output", "y.pt"], check=True)
y = torch.load("y.pt").to(device)
print(package, "without Python:", "equal" if torch.equal(y, model(x)) else "DIFFERENT")
