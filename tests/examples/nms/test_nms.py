import nms
import pytest
import torch

SPEC = {"dtypes": [torch.float32, torch.float64], "skip": {"grad": "indices have none"}}


@pytest.mark.kernel_spec(nms.ops.nms, nms.reference, shapes={"boxes": ("N<=200", 4), "scores": ("N",)}, **SPEC)
def test_equals_its_reference(check_kernel):
    check_kernel()


@pytest.mark.parametrize("count", [0, 1, 2, 100, 1000])
@pytest.mark.parametrize("iou_threshold", [-1.0, 0.0, 0.3, 1.0])
def test_boxes_that_overlap(count, iou_threshold):
    torch.manual_seed(count)
    corners = torch.rand(count, 2)
    boxes = torch.cat([corners, corners + 0.2 * torch.rand(count, 2)], 1)
    scores = torch.randint(20, (count,)).float()  # some are equal
    kept = nms.ops.nms(boxes, scores, iou_threshold)
    assert torch.equal(kept, nms.reference(boxes, scores, iou_threshold))
    assert len(kept) == count or iou_threshold < 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"boxes": torch.ones(3, 5)}, r"boxes must have shape \[N, 4\], got \[3, 5\]"),
        ({"boxes": torch.ones(4)}, r"boxes must have shape \[N, 4\], got \[4\]"),
        ({"scores": torch.ones(2)}, r"scores must have shape \[N\] = \[3\], got \[2\]"),
        ({"scores": torch.ones(3).half()}, "scores must have the dtype of boxes, Float, got Half"),
    ],
)
def test_what_does_not_fit_is_named(changes, sentence):
    with pytest.raises((ValueError, NotImplementedError), match=f"nms: {sentence}"):
        nms.ops.nms(**{"boxes": torch.ones(3, 4), "scores": torch.ones(3), "iou_threshold": 0.5} | changes)
