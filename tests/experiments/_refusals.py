"""What experiments with kept runs refuse, each in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipesgd.errors import UserInputError


def check_refused(parse: Callable[..., Any], words: Sequence[str], message: str, output: Path) -> None:
    """Check that ``parse`` refuses ``words`` in one line that matches ``message``, and torchrun, whatever the words."""
    with pytest.raises(UserInputError, match=message) as error:
        parse(["--quick", "--output", str(output), *words], by_torchrun=False)
    assert "\n" not in str(error.value)
    with pytest.raises(UserInputError, match="without torchrun"):
        parse([], by_torchrun=True)
