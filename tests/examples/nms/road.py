"""nms the whole road: outputs whose size depends on the data, also none, in Python and without."""

import shutil
import subprocess
import sys
from pathlib import Path

import nms
import torch

import identity_conv as ic


class Detections(torch.nn.Module):
    """The boxes of a score above 0.5 that no better one overlaps, their scores, and where they stood."""

    def forward(self, boxes, scores):
        likely = (scores > 0.5).nonzero().squeeze(1)
        kept = likely[nms.ops.nms(boxes[likely], scores[likely], 0.5)]
        return boxes[kept], scores[kept], kept


device = "cuda" if torch.cuda.is_available() else "cpu"
model, corners, scores = Detections(), torch.rand(50, 2, device=device), torch.rand(50, device=device)
boxes = torch.cat([corners, corners + 0.3], 1)
n = torch.export.Dim("n", max=1024)
package = ic.compile_package(ic.export(model, (boxes, scores), dynamic_shapes=({0: n}, {0: n})), "model.pt2")
loaded = ic.load_package(package)
program = shutil.which("identity-conv-run") or Path(sys.executable).with_name("identity-conv-run")

for inputs in ((boxes, scores), (boxes[:7], scores[:7] * 0), (boxes[:0], scores[:0])):
    expected = model(*inputs)
    case = f"{package}, {len(expected[0])} of {len(inputs[0])} boxes kept,"
    print(case, "in Python:", "equal" if all(map(torch.equal, loaded(*inputs), expected)) else "DIFFERENT")
    torch.save(inputs, "inputs.pt")
    subprocess.run([program, package, "--input", "inputs.pt", "--output", "outputs.pt"], check=True)
    outputs = [each.to(device) for each in torch.load("outputs.pt")]
    print(case, "without Python:", "equal" if all(map(torch.equal, outputs, expected)) else "DIFFERENT")
