"""Pictures of things in notebooks: HTML that needs nothing else, light or dark as the page around it.

What makes them is imported when a notebook asks, by `_repr_html_`, which IPython documents as the hook for it:
https://ipython.readthedocs.io/en/stable/config/integrating.html#rich-display
"""

import html
from collections.abc import Iterable, Mapping, Sequence

_DARK = """--ms-text:#e6edf3;--ms-soft:#9198a1;--ms-line:#3d444d;--ms-box:#161b22;--ms-page:#0d1117;--ms-bar:#1f6feb;
--ms-hot:#f85149;--ms-light:30%"""

STYLE = f"""
.millstream{{--ms-text:#1f2328;--ms-soft:#59636e;--ms-line:#d1d9e0;--ms-box:#f6f8fa;--ms-page:#fff;--ms-bar:#54aeff;
--ms-hot:#d1242f;--ms-light:75%;color:var(--ms-text);font:13px/1.45 system-ui,sans-serif;max-width:60rem;
text-align:left}}
@media (prefers-color-scheme:dark){{.millstream{{{_DARK}}}}}
[data-jp-theme-light=false] .millstream,.vscode-dark .millstream,html[theme=dark] .millstream,
html[data-theme=dark] .millstream{{{_DARK}}}
[data-jp-theme-light=true] .millstream,.vscode-light .millstream,html[data-theme=light] .millstream{{
--ms-text:#1f2328;--ms-soft:#59636e;--ms-line:#d1d9e0;--ms-box:#f6f8fa;--ms-page:#fff;--ms-bar:#54aeff;--ms-hot:#d1242f;
--ms-light:75%}}
.millstream *{{box-sizing:border-box}}
.millstream .ms-card{{background:var(--ms-box);border:1px solid var(--ms-line);border-radius:6px;padding:.45em .8em;
margin:0;overflow-wrap:anywhere}}
.millstream .ms-head{{display:flex;gap:.8em;align-items:baseline;flex-wrap:wrap}}
.millstream .ms-kind{{color:var(--ms-soft);font-size:.85em;text-transform:uppercase;letter-spacing:.04em}}
.millstream .ms-soft,.millstream .ms-leaf{{color:var(--ms-soft)}}
.millstream code{{color:inherit;background:none;padding:0}}
.millstream code,.millstream .ms-leaf{{font-family:ui-monospace,monospace;font-size:.92em}}
.millstream .ms-mix{{display:flex;height:.9em;border-radius:3px;overflow:hidden;margin:.4em 0 .2em}}
.millstream .ms-key{{display:inline-block;width:.7em;height:.7em;border-radius:2px;margin:0 .35em 0 .9em}}
"""
"""The style sheet of all pictures: colours of the page's theme, where it says which it has."""

PARTS_SHOWN = 12
"""Of a mixture of more parts, the first ones are named."""


def escaped(value: object) -> str:
    """Returns a text as HTML that shows it, whatever is in it."""
    return html.escape(str(value))


def figure(*parts: str, style: str = "") -> str:
    """Returns a picture made of parts, with the style that it needs."""
    return f'<div class="millstream"><style>{STYLE}{style}</style>{"".join(parts)}</div>'


def card(kind: str, title: str, *parts: str, mark: str = "") -> str:
    """Returns a box: what kind of thing it is, its name, and parts in HTML beneath.

    Args:
        kind: a word above the name.
        title: the name, as text.
        parts: what else there is, as HTML.
        mark: classes of the box, beside its own.
    """
    head = f'<div class="ms-head"><span class="ms-kind">{escaped(kind)}</span><code>{escaped(title)}</code></div>'
    return f'<div class="ms-card {mark}">{head}{"".join(parts)}</div>'


def words(facts: Mapping[str, object]) -> str:
    """Returns a line of facts, each with its name."""
    shown = " · ".join(f"{escaped(name)} {escaped(value)}" for name, value in facts.items())
    return f'<div class="ms-soft">{shown}</div>'


def leaf_lines(leaves: Iterable[str]) -> str:
    """Returns lines about the leaves of an element."""
    return "".join(f'<div class="ms-leaf">{escaped(leaf)}</div>' for leaf in leaves)


def proportions(parts: Sequence[tuple[str, float]]) -> str:
    """Returns a bar that is divided in proportion, with the names of the parts beneath."""
    whole = sum(size for _, size in parts) or 1.0
    pieces, names = [], []
    for number, (name, size) in enumerate(parts):
        # Hues that follow each other at this angle are far apart, however many there are.
        colour = f"hsl({number * 137.5 % 360:.0f} 60% var(--ms-light))"
        share = f"{size / whole:.1%}"
        pieces.append(f'<span title="{escaped(name)} {share}" style="width:{share};background:{colour}"></span>')
        if number < PARTS_SHOWN:
            names.append(f'<span class="ms-key" style="background:{colour}"></span>{escaped(name)} {share}')
    more = f" … {len(parts) - PARTS_SHOWN} more" if len(parts) > PARTS_SHOWN else ""
    return f'<div class="ms-mix">{"".join(pieces)}</div><div class="ms-soft">{"".join(names)}{more}</div>'


def document(title: str, body: str) -> str:
    """Returns a whole page, light or dark as the reader's system is."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title>"
        "<style>:root{color-scheme:light dark}body{margin:1.5rem;background:#fff}"
        "@media (prefers-color-scheme:dark){body{background:#0d1117}}</style>"
        f"</head><body>{body}</body></html>\n"
    )
