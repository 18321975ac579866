"""Published quantised weights as plain numbers.

DeepSeek-V4's files hold matrices [out, in] in two forms, each with a companion of scales (SPEC section 14; the element
formats are those of the OCP Microscaling specification 1.0, table 1):

- FP8: E4M3 elements, one scale per tile of 128 x 128; tiles at the edges may be partial.
- FP4: E2M1 elements, two to a byte along the inputs, the low nibble first; one scale per 32 inputs.

Scales are E8M0, the byte b meaning 2^(b - 127), or float32 in repacked files. A weight is element times scale.
"""

import ml_dtypes
import numpy as np

TILE = 128
GROUP = 32
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_OF_NIBBLE = np.concatenate([_E2M1, -_E2M1])
_E2M1_OF_BYTE = np.stack([_E2M1_OF_NIBBLE[np.arange(256) & 15], _E2M1_OF_NIBBLE[np.arange(256) >> 4]], axis=1)


def scales(stored: np.ndarray) -> np.ndarray:
    """E8M0 (also as plain bytes) or floats -> float32."""
    return (stored.view(ml_dtypes.float8_e8m0fnu) if stored.dtype == np.uint8 else stored).astype(np.float32)


def scale_shape(shape: tuple[int, ...], packed: bool) -> tuple[int, int]:
    """The scales' shape for a weight [out, in]."""
    rows, columns = shape
    return (rows, -(-columns // GROUP)) if packed else (-(-rows // TILE), -(-columns // TILE))


def fp8(elements: np.ndarray, scale: np.ndarray, first_row: int = 0) -> np.ndarray:
    """E4M3 rows [n, in] from `first_row` of a matrix on, its scales [out / 128, in / 128] -> float32 [n, in]."""
    rows = (first_row + np.arange(elements.shape[0])) // TILE
    columns = np.arange(elements.shape[1]) // TILE
    return elements.astype(np.float32) * scales(scale)[rows[:, None], columns[None, :]]


def fp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Bytes [n, in / 2], their scales [n, in / 32] -> float32 [n, in]."""
    elements = _E2M1_OF_BYTE[packed.view(np.uint8)].reshape(len(packed), -1)
    return elements * np.repeat(scales(scale), GROUP, axis=1)[:, : elements.shape[1]]
