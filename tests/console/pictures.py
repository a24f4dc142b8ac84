"""The pictures of the console in the README, compared with what the tests see.

`make pictures` takes them anew. Each PNG carries in a text of its own what the screen had when it was taken: its menu,
headings, buttons, columns and facts, without names and numbers. A test compares that with the screen as it is now, on
any machine: fonts do not matter. The pixels are compared coarsely, so that a file cannot be mistaken for another one.
"""

import base64
import json
import os
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

from playwright.async_api import Page

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "images"
NAMES = ("proposals", "run")
TAKE = "TRELLIS_TAKE_PICTURES"
KEYWORD = b"Trellis-Outline"
DIFFERENCE_MAX = 8.0
"""In grey levels of 255, on average: another font costs up to 5, another screen 9 and more."""
OUTLINE = """() => {
    const parts = 'nav a, main h2, main h3, main .page-head button, main .actions button, main summary, main dt, main th';
    const texts = [...document.querySelectorAll(parts)].map((one) => {
        const copy = one.cloneNode(true);
        copy.querySelectorAll('.count, kbd, .quiet').forEach((inner) => inner.remove());
        return one.tagName.toLowerCase() + ' ' + copy.textContent.replace(/[0-9].*/, '').trim();
    });
    return [...new Set(texts)].sort();
}"""
DIFFERENCES = """async ([taken, ...kept]) => {
    const grey = async (picture) => {
        const image = new Image();
        image.src = 'data:image/png;base64,' + picture;
        await image.decode();
        const place = Object.assign(document.createElement('canvas'), {width: 17, height: 11}).getContext('2d');
        place.imageSmoothingQuality = 'high';
        place.drawImage(image, 0, 0, 17, 11);
        const found = place.getImageData(0, 0, 17, 11).data.filter((_, at) => at % 4 === 1);
        return {size: [image.naturalWidth, image.naturalHeight], found: [...found]};
    };
    const mine = await grey(taken);
    return Promise.all(kept.map(async (picture) => {
        const other = await grey(picture);
        if (String(other.size) !== String(mine.size)) return 255;
        return other.found.reduce((sum, level, at) => sum + Math.abs(level - mine.found[at]), 0) / other.found.length;
    }));
}"""


def kept_at(name: str) -> Path:
    """Where the README has this picture."""
    return FOLDER / f"console-{name}.png"


async def compare_with_readme(page: Page, taken: Path, name: str) -> None:
    """Fail unless the README's picture shows this screen; with `make pictures` it is replaced instead."""
    outline = await page.evaluate(OUTLINE)
    if os.environ.get(TAKE):
        shutil.copy(taken, kept_at(name))
        _write_outline(kept_at(name), outline)
        return
    hint = f"docs/images/{kept_at(name).name} shows the console as it was: run `make pictures`"
    assert outline == _read_outline(kept_at(name)), hint
    others = [one for one in NAMES if one != name]
    pictures = [base64.b64encode(one.read_bytes()).decode() for one in (taken, kept_at(name), *map(kept_at, others))]
    own, *further = await page.evaluate(DIFFERENCES, pictures)
    assert own <= DIFFERENCE_MAX, hint
    assert own < min(further), hint


def _write_outline(path: Path, outline: Any) -> None:
    """Put the outline into a PNG as a text chunk, before its end."""
    body = path.read_bytes()
    data = KEYWORD + b"\0" + json.dumps(outline).encode("ascii")
    chunk = struct.pack(">I", len(data)) + b"tEXt" + data + struct.pack(">I", zlib.crc32(b"tEXt" + data))
    end = body.rindex(b"IEND") - 4
    path.write_bytes(body[:end] + chunk + body[end:])


def _read_outline(path: Path) -> Any:
    """The outline of a PNG; None if it has none."""
    body = path.read_bytes()
    at = body.find(b"tEXt" + KEYWORD + b"\0")
    if at < 0:
        return None
    (length,) = struct.unpack(">I", body[at - 4 : at])
    return json.loads(body[at + 4 + len(KEYWORD) + 1 : at + 4 + length])
