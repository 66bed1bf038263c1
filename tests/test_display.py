"""What objects show in a notebook: well formed, escaped, bounded, true, and nothing is built for it."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from support_package import with_manifest

import identity_conv as ic
from identity_conv import display, targets
from identity_conv.building import Target
from identity_conv.diagnosis import Finding
from identity_conv.diagnosis import Report as Diagnosis
from identity_conv.testing import Call, CheckFailure, Report, TensorPlan, Violation, check_op, plans
from identity_conv.testing.report import CheckRun

HOSTILE = "<script>alert('1')</script>&<img src=x onerror=alert(1)>"
#: Letters of HTML beyond which a notebook would notice.
MOST = 150_000

OPERATOR = """
#include <ATen/core/Tensor.h>
#include <torch/library.h>
at::Tensor same(const at::Tensor& x) { return x.alias(); }
TORCH_LIBRARY(test_display, m) { m.def("same(Tensor(a) x) -> Tensor(a)"); }
TORCH_LIBRARY_IMPL(test_display, CPU, m) { m.impl("same", &same); }
"""


class Reader(HTMLParser):
    """Reads HTML, and refuses what isn't well formed or could run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe", "object", "link", "style")
        assert not [name for name, _ in attributes if name.startswith("on") or name in ("href", "src", "id")]
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(shown: Any) -> str:
    """The text that an object shows as HTML."""
    text = shown if isinstance(shown, str) else shown._repr_html_()
    assert len(text) < MOST
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        drawing = ElementTree.fromstring(svg)
        width, height = float(drawing.get("width", "")), float(drawing.get("height", ""))
        for box in drawing.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, across, down = (float(box.get(name, "")) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + across <= width
            assert 0 <= y <= y + down <= height
    return "\n".join(reader.text)


def cells(plan: TensorPlan) -> dict[str, int]:
    """How many elements of the storage are drawn as what."""
    drawing = ElementTree.fromstring(display.memory(plan).svg)
    titles = [box[0].text or "" for box in drawing.iter("{http://www.w3.org/2000/svg}rect") if len(box)]
    kinds = [title.partition(": ")[2] for title in titles]
    owned = sum(kind.startswith("[") for kind in kinds)
    return {
        "owned": owned,
        "padding": kinds.count("not the tensor's"),
        "offset": kinds.count("offset"),
        "shared": sum(" more ind" in kind for kind in kinds),
    }


# The memory of a tensor.


def test_the_drawing_shows_each_element_as_what_it_is() -> None:
    plan = TensorPlan((3, 4), torch.int16, padding=(0, 1), offset=2, cells=((0, "min"), (-1, "max")))
    text = read(plan)
    assert cells(plan) == {"owned": 12, "padding": 3, "offset": 2, "shared": 0}
    assert "strides (5, 1); 34 bytes of storage, 24 of them the tensor's; padded, offset, special" in text
    assert {"0,1", "2,2", "min", "max", "guard", "4", "14", "24"} <= set(text.split("\n"))
    assert "bytes 4 to 5: [0, 0], min" in text
    assert "bytes 32 to 33: not the tensor's" in text


def test_the_drawing_shows_what_several_indices_share() -> None:
    windows = TensorPlan((5, 4), torch.uint8, windows=2, misalignment=3)
    assert cells(windows) == {"owned": 12, "padding": 0, "offset": 0, "shared": 8}
    assert "guard, and 3 bytes to misalign" in read(windows)
    assert cells(TensorPlan((4, 5), expand=(0,))) == {"owned": 5, "padding": 0, "offset": 0, "shared": 5}
    assert "bytes 4 to 7: [0, 1] and 3 more indices" in read(TensorPlan((4, 5), expand=(0,)))


@given(plans())
@example(TensorPlan((2, 5, 4), windows=2, expand=(0,)))
def test_every_plan_can_be_drawn_and_the_owners_are_those_of_the_tensor(plan: TensorPlan) -> None:
    text = read(plan)
    assert ("offset" in text.split("\n")) == (plan.offset > 0)
    owners: dict[int, list[tuple[int, ...]]] = {}
    strides = plan.build("meta").stride()
    if plan.numel <= 2000:
        for index in itertools.product(*map(range, plan.shape)):
            element = plan.offset + sum(i * stride for i, stride in zip(index, strides, strict=True))
            owners.setdefault(element, []).append(index)
        for element in range(plan.storage_bytes // plan.dtype.itemsize):
            indices = owners.get(element)
            assert plan.owner(element) == (indices and (indices[0], len(indices)))


@given(plans(special=True))
def test_special_values_are_shown_where_the_tensor_has_them(plan: TensorPlan) -> None:
    with_them, without = (bytes(each.build().untyped_storage()) for each in (plan, dataclasses.replace(plan, cells=())))
    differ = (at for at, pair in enumerate(zip(with_them, without, strict=True)) if len(set(pair)) > 1)
    assert {at // plan.dtype.itemsize for at in differ} <= set(plan.special_elements())


@pytest.mark.parametrize(
    "plan",
    [
        TensorPlan((100_000, 100_000)),
        TensorPlan((100_000, 100_000), permutation=(1, 0), padding=(3, 5), offset=10**9),
        TensorPlan((2,) * 20),
        TensorPlan((10**6,), step=(3,)),
        TensorPlan((3, 3), cells=((0, "nan"),) * 10_000),
    ],
    ids=["large", "large and far", "of rank 20", "one row", "many cells"],
)
def test_a_huge_plan_is_cut(plan: TensorPlan) -> None:
    assert "guard" in read(plan)
    assert sum(cells(plan).values()) < 500


def test_of_a_far_offset_the_end_is_shown() -> None:
    text = read(TensorPlan((300, 400), offset=10**6)).split("\n")
    assert {"0,0", "1,0", "4,000,000"} <= set(text)


def test_a_plan_is_still_its_constructor_in_text() -> None:
    plan = TensorPlan((2, 3), torch.int32, offset=1)
    assert repr(plan) == "TensorPlan((2, 3), torch.int32, offset=1)"


# Extensions.


def test_showing_an_extension_builds_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "build", lambda *_, **__: pytest.fail("built"))
    monkeypatch.setattr(Target, "parts", lambda self: pytest.fail("compilers were asked"))
    source = tmp_path / "a<b>&c.cpp"
    source.write_text(OPERATOR)
    ext = ic.Extension("unbuilt", [source])
    text = read(ext)
    assert "Extension unbuilt" in text
    assert "a<b>&c.cpp" in text
    assert "not loaded: load() builds it if need be" in text
    source.unlink()
    assert read(ext) == text
    assert not cache.exists()


def test_a_loaded_extension_shows_what_it_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("same.cpp").write_text(OPERATOR)
    ext = ic.Extension("test_display", ["same.cpp"])
    assert repr(ext) == "Extension('test_display', ['same.cpp'])"
    assert ext.load() is ext
    text = read(ext)
    assert "test_display::same(Tensor(a) x) -> Tensor(a)" in text.split("\n")
    assert "CPU" in text.split("\n")
    assert "libtest_display.so" in text
    assert re.search(rf"{ext.key}, for CPU: .*compiled in \d+\.\d s", text)
    ext.load()
    assert "found in the cache, compiled in" in read(ext)
    assert str(tmp_path) not in ext._repr_html_()

    Path("same.cpp").write_text(OPERATOR.replace("x.alias()", "x"))
    ic.Extension("test_display", ["same.cpp"]).load()
    assert "Another build has taken its place" in read(ext)


def test_a_build_of_now_says_so(cache: Path, source: Path) -> None:
    ext = ic.Extension("tiny", [source]).load()
    assert re.search(r"compiled in \d+\.\d s by this load\(\)", read(ext))
    shutil.rmtree(cache)
    assert "not of the cache" in read(ext)


def test_a_class_is_shown_with_its_methods() -> None:
    text = read(ic.Extension._of(targets.operators()).load())
    assert "class my_ops.IdentityConvClass" in text
    assert "forward(Tensor x) -> Tensor" in text.split("\n")
    assert "__init__(int channels) -> NoneType" in text.split("\n")
    row = text.split("\n")[text.split("\n").index("my_ops::identity_conv_op(Tensor x) -> Tensor") + 1]
    assert {"CPU", "Meta", "Autograd"} <= set(row.split(", "))


# Packages.


def test_a_package_shows_what_inspect_does(packages: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copy(packages["cpu"], tmp_path / "model.pt2")
    package = ic.load_package(path)
    text = read(package)
    lines = text.split("\n")
    assert {"input x", "float32", "recorded", "libidentity_conv_ops.so", "native1.weight, native2.weight"} <= set(lines)
    assert "my_ops::identity_conv_op(Tensor x) -> Tensor" in lines
    assert "class my_ops::IdentityConvClass" in lines
    assert re.search(r"from 0 to 64|from 1 to 64", text)
    assert f"{path.stat().st_size:,}" in lines
    assert "data/identity_conv/lib/libidentity_conv_ops.so" in lines

    with_manifest(path, path.with_name("other.pt2"), lambda manifest: manifest.update(note="another")).replace(path)
    assert "input x" in read(package)
    assert "data/identity_conv/lib/libidentity_conv_ops.so" not in read(package)
    path.unlink()
    assert read(package).split("\n")[0] == "package"
    package.close()
    assert "closed" in read(package)


@pytest.mark.parametrize("forged", [HOSTILE, 7, None, [1], {"a": HOSTILE}, [{"sizes": 3}], [{"sizes": [HOSTILE]}]])
def test_a_forged_manifest_is_shown_as_text(packages: dict[str, Path], tmp_path: Path, forged: Any) -> None:
    def change(manifest: dict[str, Any]) -> None:
        # What loading doesn't look at may be anything.
        manifest.update(provenance=forged, torch={**manifest["torch"]}, outputs=forged)

    package = ic.load_package(with_manifest(packages["cpu"], tmp_path / "forged.pt2", change))
    assert "input x" in read(package)


# Graphs.


def test_the_graph_shows_every_call_and_what_feeds_it() -> None:
    program = ic.export(ic.IdentityModel(), (torch.randn(2, 3, 8, 8),))
    picture = display.graph(program)
    text = read(picture)
    said = text.split("\n")
    assert said.count("aten.conv2d.default") == 2
    assert {"x", "call_torchbind: forward", "my_ops.identity_conv_op.default", "output"} <= set(said)
    assert {"native1.weight", "native2.weight", "custom_class.conv"} <= set(said)
    assert said.count("float32 [2, 3, 8, 8]") == 5
    assert repr(picture) == f"Picture({len(picture.svg):,} letters of SVG)"


def test_a_graph_of_several_inputs_and_outputs_is_drawn() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("<a>&b", torch.ones(4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first, second = torch.split(self.linear(x) + y + getattr(self, "<a>&b"), 2)
            return first, second + y[:2]

    said = read(display.graph(ic.export(Model(), (torch.randn(4, 4), torch.randn(4, 4))))).split("\n")
    assert {"x", "y", "linear.weight", "linear.bias", "<a>&b", "getitem", "float32 [2, 4], float32 [2, 4]"} <= set(said)


def test_a_long_graph_is_cut() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                x = x + 1
            return x

    text = read(display.graph(ic.export(Model(), (torch.randn(2),))))
    assert "⋮ 262 more" in text
    assert text.split("\n").count("aten.add.Tensor") == 38


# Reports.


def test_the_doctors_report_shows_verdicts_and_remedies() -> None:
    doubtful, bad = Finding(HOSTILE, HOSTILE, "warning", HOSTILE), Finding("bad", "no", "fatal", "mend it")
    report = Diagnosis([Finding("good", "yes"), doubtful, bad])
    text = read(report)
    assert text.count(HOSTILE) == 3
    assert "mend it" in text
    shown = report._repr_html_()
    colours = [re.search(rf"color:(#\w+)[^>]*>{verdict}<", shown) for verdict in ("ok", "warning", "fatal")]
    assert all(colours)
    assert len({match.group(1) for match in colours if match}) == 3
    assert "verdict" in read(ic.doctor(probes=False))


def test_the_checkers_report_shows_what_is_wrong() -> None:
    @torch.library.custom_op("test_display::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    doubled.register_fake(lambda x: x.new_empty(x.shape))
    with pytest.raises(CheckFailure) as raised:
        check_op(doubled, lambda x: x * 2, dtypes=[torch.float32], skip={"grad": "not trained"})
    report = raised.value.report
    text = read(report)
    assert "1 violated" in text
    assert "fake (cpu): says otherwise than the operator does: expected strides (1, 2), got (3, 1)" in text
    assert "a program that shows it" in text
    assert "skipped: not trained" in text
    assert report._repr_html_().count("<svg") == 1  # the memory of the input that shows it


def test_a_report_is_escaped_and_cut() -> None:
    case = Call((TensorPlan((3, 2), torch.float32),) * 50, {HOSTILE: 1})
    violation = Violation("values", HOSTILE, case=case, reproducer=HOSTILE * 10_000)
    run = CheckRun(HOSTILE, "cpu", 3, 1.0, [violation] * 500, [HOSTILE] * 500)
    report = Report(HOSTILE, "quick", 0, [run] * 200, {HOSTILE: HOSTILE})
    text = read(report)
    assert HOSTILE in text
    assert "500 violated" in text
    assert "and 141 more" in text  # rows
    assert "more violations" in text


def test_a_table_cuts_long_cells_and_many_rows() -> None:
    text = read(display.page(display.table(("a", "b"), [("x" * 10_000, "y")] * 1000)))
    assert "and 940 more" in text
    assert "x" * display.LETTERS not in text
