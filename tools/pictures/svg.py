"""An SVG document: boxes, lines and text, with colors for light and dark pages."""

from __future__ import annotations

import dataclasses
from xml.sax.saxutils import escape

# The system of the reader selects light or dark. The picture has its own background.
_STYLE = """\
    svg { color-scheme: light dark }
    .page { fill: #ffffff; stroke: #d0d7de }
    .part { fill: #eaeef2; stroke: #57606a }
    .mine { fill: #f9c74f; stroke: #57606a }
    .token { fill: #57606a }
    .fresh { fill: #cf222e }
    .room { fill: #f3f5f7; stroke: #afb8c1 }
    .line { stroke: #57606a; fill: none; stroke-width: 1.5 }
    .head { fill: #57606a }
    text { fill: #1f2328; font: 13px system-ui, "DejaVu Sans", sans-serif }
    .title { font-size: 15px; font-weight: 600 }
    .code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px }
    .soft { fill: #57606a }
    .inside { fill: #1f2328; font-size: 12px; text-anchor: middle }
    .bold { font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      .page { fill: #161b22; stroke: #3d444d }
      .part { fill: #2d333b; stroke: #8b949e }
      .mine { fill: #9a6b00; stroke: #8b949e }
      .token { fill: #adbac7 }
      .fresh { fill: #ff7b72 }
      .room { fill: #21262d; stroke: #57606a }
      .line { stroke: #9198a1 }
      .head { fill: #9198a1 }
      text, .inside { fill: #e6edf3 }
      .soft { fill: #9198a1 }
    }"""

# The mean width of a letter in a wide font, in pixels, by the kind of text.
_LETTERS = {"": 7.1, "code": 7.3, "title": 9.2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle: its upper left corner and its size, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


class Picture:
    """Shapes in the order in which they are drawn.

    Args:
      title: What the picture shows, for readers who cannot see it.
      width: Width of the drawing in pixels. A page may scale it.
      height: Height of the drawing in pixels.
      scale: Largest factor by which a page enlarges the picture.
    """

    def __init__(self, *, title: str, width: int, height: int, scale: float = 1.4) -> None:
        self.title = title
        self.width, self.height, self.scale = width, height, scale
        self._shapes: list[str] = []
        page = Box(x=0.5, y=0.5, width=width - 1, height=height - 1)
        self.box(page, kind="page", radius=8)

    def box(self, box: Box, *, kind: str, radius: float = 0) -> None:
        """Draw a rectangle; `kind` is a class of the style sheet."""
        corner = f' rx="{radius:g}"' if radius else ""
        size = f'width="{box.width:g}" height="{box.height:g}"'
        self._shapes.append(f'<rect class="{kind}" x="{box.x:g}" y="{box.y:g}" {size}{corner}/>')

    def text(self, x: float, y: float, words: str, *, kind: str = "") -> None:
        """Write one line of text; `y` is its base line.

        Raises:
          ValueError: the text may end outside the picture.
        """
        letter = max(width for name, width in _LETTERS.items() if name in kind)
        if kind != "inside" and x + letter * len(words) > self.width - 8:
            raise ValueError(f"{words!r} is too long for a picture {self.width} pixels wide")
        named = f' class="{kind}"' if kind else ""
        self._shapes.append(f'<text{named} x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def label(self, box: Box, words: str) -> None:
        """Write text in the middle of a box."""
        x, y = box.middle
        self.text(x, y + 4, words, kind="inside")

    def arrow(self, x: float, y: float, *, length: float) -> None:
        """Draw an arrow that points down."""
        end = y + length
        self._shapes.append(f'<path class="line" d="M{x:g} {y:g}V{end - 6:g}"/>')
        tip = f"M{x - 5:g} {end - 8:g}L{x + 5:g} {end - 8:g}L{x:g} {end:g}Z"
        self._shapes.append(f'<path class="head" d="{tip}"/>')

    def render(self) -> str:
        """Return the document."""
        shown = f'width="{self.width * self.scale:g}" height="{self.height * self.scale:g}"'
        view = f'viewBox="0 0 {self.width} {self.height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {shown} {view}>',
            f"  <title>{escape(self.title)}</title>",
            "  <style>",
            _STYLE,
            "  </style>",
            *(f"  {shape}" for shape in self._shapes),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"
