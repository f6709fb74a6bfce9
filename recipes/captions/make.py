"""Write a corpus of pictures, sound and words: digits in many fonts and sizes, and dial tones.

Pictures are drawn with the fonts that matplotlib brings, from 16 to 96 pixels high, some on a wide
or high ground: items of very different sizes. Sound is the two tones of a telephone's key. A third
of the rows are words alone. Fonts of held-out rows are in no row that is trained.

    python recipes/captions/make.py            writes pictures, tones, train.jsonl and held.jsonl
"""

import json
import math
import random
import struct
import wave
from pathlib import Path

import matplotlib as mpl
from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).parent / "corpus"
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LOW, HIGH = (697, 770, 852, 941), (1209, 1336, 1477)
"""Hertz of a telephone's rows and columns (ITU-T Q.23)."""
RATE = 8000


def read_fonts() -> list[Path]:
    """Fonts that have digits, in the order of their names."""
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    return [each for each in sorted(folder.glob("*.ttf")) if each.stem[:4] in ("Deja", "STIX")]


def draw_digit(digit: int, font: Path, draw: random.Random) -> Image.Image:
    """A digit, its font as large as its picture allows; grounds of a few shapes."""
    high = draw.choice((16, 24, 32, 48, 64, 96))
    letters = ImageFont.truetype(str(font), int(high * draw.uniform(0.7, 0.9)))
    wide = int(high * draw.choice((0.75, 1.0, 1.0, 1.5)))
    ground, ink = draw.sample(range(256), 2)
    while abs(ground - ink) < 90:
        ground, ink = draw.sample(range(256), 2)
    image = Image.new("L", (wide, high), ground)
    pen = ImageDraw.Draw(image)
    pen.text((wide / 2, high / 2), str(digit), fill=ink, font=letters, anchor="mm")
    return image


def write_tone(file: Path, digit: int, draw: random.Random) -> None:
    """The tones of a digit's key, from 0.1 to 0.5 s long."""
    row, column = (3, 1) if digit == 0 else divmod(digit - 1, 3)
    first, second = LOW[row], HIGH[column]
    loud = draw.uniform(3000, 12_000)
    with wave.open(str(file), "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        for at in range(int(RATE * draw.uniform(0.1, 0.5))):
            turn = 2 * math.pi * at / RATE
            out.writeframesraw(
                struct.pack("<h", int(loud * (math.sin(first * turn) + math.sin(second * turn))))
            )


def write_rows(name: str, count: int, fonts: list[Path], draw: random.Random) -> None:
    """Rows of one file, with the pictures and tones that they name."""
    rows = []
    for number in range(count):
        digit = draw.randrange(10)
        said = {"text": f"This is {WORDS[digit]}."}
        stem = f"{name}-{number:05d}"
        kind = draw.choice(("picture", "picture", "picture", "tone", "words"))
        if kind == "picture":
            draw_digit(digit, draw.choice(fonts), draw).save(HERE / f"{stem}.png")
            rows.append([{"image": f"{stem}.png"}, said])
        elif kind == "tone":
            write_tone(HERE / f"{stem}.wav", digit, draw)
            rows.append([{"audio": f"{stem}.wav"}, said])
        else:
            following = WORDS[(digit + 1) % 10]
            rows.append([{"text": f"After {WORDS[digit]} comes {following}."}])
    lines = (json.dumps({"parts": row}) + "\n" for row in rows)
    (HERE / f"{name}.jsonl").write_text("".join(lines))


def main() -> None:
    """Write the corpus, the same each time."""
    HERE.mkdir(exist_ok=True)
    fonts, draw = read_fonts(), random.Random(0)  # noqa: S311
    draw.shuffle(fonts)
    write_rows("train", 3000, fonts[4:], draw)
    write_rows("held", 200, fonts[:4], draw)


if __name__ == "__main__":
    main()
