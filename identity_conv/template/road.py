"""my_kernel the whole road: a model, export, model.pt2, Python, and the program without Python."""

import shutil
import subprocess
import sys
from pathlib import Path

import identity_conv as ic
import my_kernel
import torch


class Model(torch.nn.Module):
    # <class>
    def __init__(self):
        super().__init__()
        self.kernel = my_kernel.classes.MyKernel(factor=2.0)

    def forward(self, x):
        return self.kernel.forward(x)
    # </class>
    # <not class>
    def forward(self, x):
        return my_kernel.ops.my_kernel(x, 2.0)
    # </not class>


# <cuda>
device = "cuda" if torch.cuda.is_available() else "cpu"
# </cuda>
# <not cuda>
device = "cpu"
# </not cuda>
model, x = Model(), torch.randn(4, 8, device=device)
n = torch.export.Dim("n", min=1, max=1024)
package = ic.compile_package(ic.export(model, (x,), dynamic_shapes=({0: n},)), "model.pt2")
print(package, "in Python:", "equal" if torch.equal(ic.load_package(package)(x), model(x)) else "DIFFERENT")

torch.save(x, "x.pt")
program = shutil.which("identity-conv-run") or Path(sys.executable).with_name("identity-conv-run")
subprocess.run([program, package, "--input", "x.pt", "--output", "y.pt"], check=True)
y = torch.load("y.pt").to(device)
print(package, "without Python:", "equal" if torch.equal(y, model(x)) else "DIFFERENT")
