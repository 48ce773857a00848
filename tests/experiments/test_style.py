"""The style of figures: one colour per method, whatever the user's own style is."""

from __future__ import annotations

import doctest

from experiments import style

NAMES = (
    *("local", "ps-sync", "ps-async", "D-Sync", "D-Sync, native", "ddp", "ddp fp16", "pipelined", "pipelined, int8"),
    *("width 2", "width 2, native", "width 2, int8", "width 2, int4", "width 2, ternary", "width 3", "ours, int4"),
)


def test_a_method_has_one_colour_and_a_codec_one_line_wherever_they_are_drawn() -> None:
    styles = style.method_styles(NAMES)
    assert all(style.method_of(name) for name in NAMES)
    for name, look in styles.items():
        assert look == style.method_styles([name])[name] | {"marker": look["marker"]}
    looks = [(look["color"], str(look["linestyle"]), look["marker"]) for look in styles.values()]
    assert len(set(looks)) == len(looks)
    assert len(set(style.METHODS.values())) == len(style.METHODS)
    assert styles["width 2, int8"]["color"] == styles["width 2"]["color"]
    assert styles["width 2, int8"]["linestyle"] != styles["width 2, int4"]["linestyle"]


def test_the_examples_of_the_style() -> None:
    result = doctest.testmod(style)
    assert result.attempted > 0
    assert result.failed == 0


def test_who_is_unknown_gets_a_colour_that_is_nobody_elses() -> None:
    styles = style.method_styles(["width 2", "width 20", "mine"])
    colours = [look["color"] for look in styles.values()]
    assert len(set(colours)) == 3
    assert not set(colours[1:]) & set(style.METHODS.values())


def test_the_style_is_the_projects_whatever_the_users_is() -> None:
    import matplotlib

    with matplotlib.rc_context({"axes.grid": False, "font.size": 30}):
        with style.styled():
            assert matplotlib.rcParams["axes.grid"]
            assert matplotlib.rcParams["font.size"] == 9
        assert matplotlib.rcParams["font.size"] == 30
