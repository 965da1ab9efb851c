"""Small pictures for a report: PNG files in base64, broken pixels in cyan as the paper shows them."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from torch import Tensor

from bilip.record import Picture

__all__ = ["is_image", "picture", "png"]

CYAN = (0, 255, 255)
_LARGEST = 64


def is_image(shape: tuple[int, ...]) -> bool:
    """Whether samples of this shape can be looked at: one or three channels, at least 4 x 4 pixels.

    Example:
        >>> is_image((3, 32, 32)), is_image((8,))
        (True, False)
    """
    return len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= 4


def png(pixels: Tensor) -> bytes:
    """A PNG file from bytes of shape `(height, width, 3)`.

    Example:
        >>> png(torch.zeros(2, 2, 3, dtype=torch.uint8))[1:4]
        b'PNG'
    """
    height, width, _ = pixels.shape
    rows = pixels.cpu().contiguous().numpy()
    raw = b"".join(b"\0" + rows[k].tobytes() for k in range(height))

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def picture(image: Tensor, low: float, high: float, title: str, alt: str, group: str = "") -> Picture:
    """One sample of shape `(channels, height, width)` with values from `low` to `high`; pixels that are not finite are cyan.

    Example:
        >>> picture(torch.zeros(1, 8, 8), 0.0, 1.0, "black", "a black square").title
        'black'
    """
    image = image.detach().double().cpu()
    step = max(1, max(image.shape[1:]) // _LARGEST)
    image = image[:, ::step, ::step].expand(3, -1, -1)
    broken = ~torch.isfinite(image).all(0)
    levels = ((image.nan_to_num(low, high, low) - low) / max(high - low, 1e-12)).clamp(0, 1).mul(255).round()
    pixels = levels.to(torch.uint8).permute(1, 2, 0).clone()
    pixels[broken] = torch.tensor(CYAN, dtype=torch.uint8, device="cpu")
    return Picture(title, alt, base64.b64encode(png(pixels)).decode(), group)
