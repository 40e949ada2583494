"""Renderings for notebooks: self-contained HTML, light or dark like the page around it.

The modules that render are imported on the first call of `_repr_html_`, IPython's hook for it:
https://ipython.readthedocs.io/en/stable/config/integrating.html#rich-display
"""

import html
from collections.abc import Iterable, Sequence

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
.millstream table{{border-collapse:collapse;margin:.3em 0 1em;max-width:100%}}
.millstream th,.millstream td{{border:1px solid var(--ms-line);padding:.25em .6em;text-align:left;vertical-align:top;
background:var(--ms-page);color:var(--ms-text);overflow-wrap:anywhere}}
.millstream th{{background:var(--ms-box);font-weight:600}}
.millstream .ms-key{{display:inline-block;width:.7em;height:.7em;border-radius:2px;margin:0 .35em 0 .9em}}
"""
"""The style sheet of all renderings, in the colours of the page's theme if it declares one."""

SHARES_SHOWN = 12
"""Maximum number of parts of a mixture that are named."""


def escaped(value: object) -> str:
    """Returns a text as HTML that displays it."""
    return html.escape(str(value))


def figure(*fragments: str, style: str = "") -> str:
    """Returns a rendering of the given fragments, with its style sheet."""
    return f'<div class="millstream"><style>{STYLE}{style}</style>{"".join(fragments)}</div>'


def card(kind: str, title: str, *fragments: str) -> str:
    """Returns a box."""
    head = f'<div class="ms-head"><span class="ms-kind">{escaped(kind)}</span><code>{escaped(title)}</code></div>'
    return f'<div class="ms-card">{head}{"".join(fragments)}</div>'


def soft(text: str) -> str:
    """Returns a line of text in the colour of remarks; "" for no text."""
    return f'<div class="ms-soft">{escaped(text)}</div>' if text else ""


def leaf_lines(leaves: Iterable[str]) -> str:
    """Returns one line for each leaf of an element."""
    return "".join(f'<div class="ms-leaf">{escaped(leaf)}</div>' for leaf in leaves)


def proportions(shares: Sequence[tuple[str, float]], caption: str = "") -> str:
    """Returns a bar that is divided in proportion, with a caption above it and the names of the parts below."""
    whole = sum(size for _, size in shares) or 1.0
    segments, names = [], []
    for number, (name, size) in enumerate(shares):
        # Consecutive hues at this angle differ clearly, however many there are.
        colour = f"hsl({number * 137.5 % 360:.0f} 60% var(--ms-light))"
        share = f"{size / whole:.1%}"
        segments.append(f'<span title="{escaped(name)} {share}" style="width:{share};background:{colour}"></span>')
        if number < SHARES_SHOWN:
            names.append(f'<span class="ms-key" style="background:{colour}"></span>{escaped(name)} {share}')
    more = f" … {len(shares) - SHARES_SHOWN} more" if len(shares) > SHARES_SHOWN else ""
    bar = f'<div class="ms-mix">{"".join(segments)}</div>'
    return f'{soft(caption)}{bar}<div class="ms-soft">{"".join(names)}{more}</div>'


def table(head: Sequence[str], *rows: Sequence[str]) -> str:
    """Returns an HTML table."""
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{cell}</{tag}>" for cell in row) for tag, row in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"


def document(title: str, body: str) -> str:
    """Returns an entire page, light or dark like the reader's system."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title>"
        "<style>:root{color-scheme:light dark}body{margin:1.5rem;background:#fff}"
        "@media (prefers-color-scheme:dark){body{background:#0d1117}}</style>"
        f"</head><body>{body}</body></html>\n"
    )
