"""JSON files from outside: read whole, refused in one line that names them."""

import json
import os
import pathlib
from typing import Any

MAX_BYTES = 1 << 30


def read_text(path: str | os.PathLike[str]) -> str:
  """The text of a UTF-8 file, without a byte order mark.

  Raises:
    ValueError: if the file is larger than MAX_BYTES or no UTF-8.
  """
  file = pathlib.Path(path)
  size = file.stat().st_size
  if size > MAX_BYTES:
    raise ValueError(f"{str(file)!r} has {size} bytes, allowed are {MAX_BYTES}")
  try:
    return file.read_bytes().decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{str(file)!r} is no UTF-8 ({error.reason} at byte {error.start}): "
      "fetch it again or convert it"
    ) from error


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
  """The keys of a file that holds one JSON object.

  Raises:
    ValueError: if it is too large, no UTF-8, no JSON, or no object.
  """
  file, text = pathlib.Path(path), read_text(path)
  try:
    values = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{str(file)!r} is no JSON: {error}") from error
  if not isinstance(values, dict):
    raise ValueError(f"{str(file)!r} is JSON but no object")
  return values
