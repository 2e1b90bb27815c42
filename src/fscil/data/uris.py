"""Pictures inside an HTML page itself, so that no file of theirs is ever served."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image


def data_uri(picture: np.ndarray, longest: int | None = None) -> str:
    """A picture uint8 (height, width, 3) as a JPEG in a data URI, its longer side reduced to `longest` if given.

    >>> data_uri(np.zeros((8, 8, 3), np.uint8))[:27]
    'data:image/jpeg;base64,/9j/'
    """
    image, out = Image.fromarray(picture), io.BytesIO()
    if longest is not None:
        image.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    image.save(out, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
