"""What surrounds a call: grad mode, autocast, stream."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

GRAD_MODES = ("enabled", "disabled", "inference")


@dataclasses.dataclass(frozen=True)
class Context:
    """The state of torch that a call meets.

    Args:
        device: "cpu" or "cuda".
        grad: "enabled", "disabled" (``no_grad``) or "inference".
        autocast: the dtype of autocast, None for none.
        side_stream: whether the call is on a stream that isn't the default one (CUDA).

    Raises:
        ValueError: an argument isn't one of these.

    Example::

        >>> with Context(grad="inference").enter():
        ...     torch.is_inference_mode_enabled()
        True
    """

    device: str = "cpu"
    grad: str = "enabled"
    autocast: torch.dtype | None = None
    side_stream: bool = False

    def __post_init__(self) -> None:
        if self.grad not in GRAD_MODES:
            raise ValueError(f"Context: grad must be one of {', '.join(GRAD_MODES)}, got {self.grad!r}")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"Context: autocast must be None, torch.bfloat16 or torch.float16, got {self.autocast!r}")
        if self.side_stream and torch.device(self.device).type != "cuda":
            raise ValueError(f"Context: side_stream must be False on {self.device}, which has no streams")

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Sets this state, and sets it back; a side stream is joined at the end."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                {
                    "enabled": torch.enable_grad(),
                    "disabled": torch.no_grad(),
                    "inference": torch.inference_mode(),
                }[self.grad]
            )
            if self.autocast is not None:
                stack.enter_context(torch.autocast(torch.device(self.device).type, self.autocast))
            if self.side_stream:
                outside, stream = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
                stream.wait_stream(outside)
                stack.callback(outside.wait_stream, stream)
                stack.enter_context(torch.cuda.stream(stream))
            yield
