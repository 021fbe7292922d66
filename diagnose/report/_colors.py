"""One colour per phase, the same in every picture, with the colour of the text that stands on it."""

from __future__ import annotations

from diagnose.core.phases import Phase

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#14171c"
LIGHT_TEXT, DARK_TEXT = "#ffffff", "#0b0d10"

PHASE_COLORS: dict[Phase, str] = {
    Phase.DATA_WAIT: "#e06a2f",
    Phase.COPY: "#b5881f",
    Phase.FORWARD: "#3975c9",
    Phase.BACKWARD: "#7a5cc9",
    Phase.COMMUNICATION: "#c2428b",
    Phase.OPTIMIZER: "#35a06f",
    Phase.EVALUATION: "#2a99a8",
    Phase.CHECKPOINT: "#94693f",
    Phase.COMPILE: "#76902a",
    Phase.GC: "#c93f47",
    Phase.OTHER: "#8a929e",
}
"""Each stands out from both pages by a contrast of at least 3, as WCAG asks of graphics."""


SHADES = ("#f5c89d", "#e9a065", "#d27335", "#a94c1a", "#7a3010")
"""One hue from pale to dark: the order survives without seeing the colour, and in print. Both ends stand
out from both pages: a cell of the palest is no gap."""


def contrast(one: str, other: str) -> float:
    """Returns the contrast of two colours as WCAG defines it, from 1 (none) to 21."""
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def text_on(color: str) -> str:
    """Returns the text colour that is read best on `color`."""
    return max(DARK_TEXT, LIGHT_TEXT, key=lambda text: contrast(color, text))


def _luminance(color: str) -> float:
    channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
