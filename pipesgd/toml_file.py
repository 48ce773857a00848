"""A TOML file that the user wrote, as a table; an error is one line."""

from __future__ import annotations

import codecs
import tomllib
from pathlib import Path
from typing import Any

from pipesgd.errors import UserInputError

MOST_BYTES = 16 * 1024
"""Largest size of a file in bytes: tomllib takes very long for some longer ones."""


def read_toml(option: str, path: Path) -> dict[str, Any]:
    """Return the table in the TOML file ``path``, which ``option`` names.

    Raises:
        UserInputError: the file cannot be read, is too long, or is not TOML.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserInputError(f"{option} must have at most {MOST_BYTES} bytes; got a longer file: {path}")
        return tomllib.loads(_decoded(content))
    except OSError as error:
        raise UserInputError(f"{option} must be a readable file; got {path}: {error.strerror}") from None
    except RecursionError:
        raise UserInputError(f"{option} must be a TOML file; got {path}: it is nested too deeply") from None
    except UserInputError:
        raise
    except ValueError as error:  # not UTF-8, not TOML, or a path that no file can have
        raise UserInputError(f"{option} must be a TOML file; got {path}: {error}") from None


def _decoded(content: bytes) -> str:
    """Return the text of a file without the mark that some editors put in front; ``timing_model.toml_io`` does, too."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content[:4]:
        raise ValueError("it is UTF-16 or UTF-32, and TOML must be saved as UTF-8")
    return content.decode("utf-8-sig")
