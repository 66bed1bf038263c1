"""my_kernel, compiled on the first import and whenever its sources change."""

from pathlib import Path

from identity_conv import Extension

HERE = Path(__file__).parent
# <cuda>
extension = Extension("my_kernel", [HERE / "my_kernel.cpp", HERE / "my_kernel.cu"]).load()
# </cuda>
# <not cuda>
extension = Extension("my_kernel", [HERE / "my_kernel.cpp"]).load()
# </not cuda>
ops, classes = extension.ops, extension.classes
