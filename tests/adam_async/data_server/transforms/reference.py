"""A slow reference for recipes: one image, one pixel, one step after another, in Python's numbers.

Shares nothing with the product but the dice. Places are exact fractions until they are rounded to 1/65536.
"""

import math
from fractions import Fraction

import numpy as np

DEFAULTS = {
    "shift": {"whole": True, "edge": "black"},
    "flip": {"direction": "horizontal", "chance": 0.5, "edge": None},
    "rotate": {"edge": "black"},
    "scale": {"edge": "black"},
    "shear": {"edge": "black"},
    "elastic": {"grid": 4, "edge": "black"},
    "crop": {"rows": None, "columns": None, "padding": 0, "edge": "black"},
    "pad": {"edge": "black"},
    "cutout": {"level": 0},
    "normalise": {"mean": None, "std": None, "to_mean": 128, "to_std": 64},
}
MOVES = ("shift", "flip", "rotate", "scale", "shear", "elastic")


def variant(steps, image, number, *, dice, epoch):
    """Make the variant of one image, uint8 (C, H, W)."""
    steps = [{**DEFAULTS.get(step["kind"], {}), **step, "at": at} for at, step in enumerate(steps)]

    def draw(step, count):
        range_of_image = 4 * math.ceil(count / 4)
        words = dice.bits("augment", keys=(epoch, step["at"]), start=range_of_image * number, count=count)
        return [int(word) for word in words]

    image = image.tolist()
    while steps:
        if steps[0]["kind"] not in MOVES:
            step = steps.pop(0)
            image = globals()[step["kind"]](image, step, draw)
            continue
        together = [steps.pop(0)]
        while steps and go_together(together, steps[0]):
            together.append(steps.pop(0))
        image = move(image, together, draw)
    return np.array(image, np.uint8)


def go_together(steps, step):
    if step["kind"] not in MOVES or (
        step["kind"] == "elastic" and step["kind"] in [s["kind"] for s in steps]
    ):
        return False
    return len({s["edge"] for s in (*steps, step)} - {None}) < 2


def fraction(word):
    """In [0, 1)."""
    return Fraction(word >> 11, 2**53)


def either_way(word):
    """In [-1, 1)."""
    return 2 * fraction(word) - 1


def rounded(value, parts=65536):
    return math.floor(value * parts + Fraction(1, 2))


def size(image):
    return len(image), len(image[0]), len(image[0][0])


def pixel(image, channel, row, column, edge):
    _, rows, columns = size(image)
    if edge == "repeat":
        row, column = min(max(row, 0), rows - 1), min(max(column, 0), columns - 1)
    return image[channel][row][column] if 0 <= row < rows and 0 <= column < columns else 0


def move(image, steps, draw):
    """Look up every pixel where the steps, the last one first, say that it came from."""
    channels, rows, columns = size(image)
    middle_x, middle_y = Fraction(columns - 1, 2), Fraction(rows - 1, 2)
    edge = next((step["edge"] for step in steps if step["edge"]), "black")
    drawn = [draw(step, words_of(step)) for step in steps]

    def source(column, row, displaced=(0, 0)):
        x, y = column - middle_x, row - middle_y
        for step, words in reversed(list(zip(steps, drawn, strict=True))):
            x, y = came_from(step, words, x, y, displaced)
        return x + middle_x, y + middle_y

    # The map is linear but for what is displaced: three places tell all of it.
    x0, y0 = source(0, 0)
    (x1, y1), (x2, y2) = source(1, 0), source(0, 1)
    per_column, per_row = (rounded(x1 - x0), rounded(y1 - y0)), (rounded(x2 - x0), rounded(y2 - y0))
    start = rounded(x0), rounded(y0)
    field = None
    for step, words in zip(steps, drawn, strict=True):
        if step["kind"] == "elastic":
            points = step["grid"] + 3
            moves = [either_way(word) * Fraction(step["pixels"]) for word in words]
            field = {}
            for i in range(points):
                for j in range(points):
                    by = moves[i * points + j], moves[points * points + i * points + j]
                    x, y = source(0, 0, by)
                    field[i, j] = rounded(x - x0), rounded(y - y0)
            grid = step["grid"]

    def at(channel, row, column):
        place = [start[axis] + per_column[axis] * column + per_row[axis] * row for axis in (0, 1)]
        if field is not None:
            for axis in (0, 1):
                place[axis] += displacement(field, grid, axis, row, rows, column, columns)
        x, y = ((units + 128) // 256 for units in place)
        left, top, right_share, bottom_share = x // 256, y // 256, x % 256, y % 256
        total = 0
        for down, height in ((0, 256 - bottom_share), (1, bottom_share)):
            for right, width in ((0, 256 - right_share), (1, right_share)):
                total += height * width * pixel(image, channel, top + down, left + right, edge)
        return (total + 32768) // 65536

    return [[[at(k, r, c) for c in range(columns)] for r in range(rows)] for k in range(channels)]


def words_of(step):
    return {"shift": 2, "elastic": 2 * (step.get("grid", 0) + 3) ** 2}.get(step["kind"], 1)


def came_from(step, words, x, y, displaced):
    kind = step["kind"]
    if kind == "shift":
        moves = []
        for word in words:
            most = Fraction(step["pixels"])
            whole = math.floor(fraction(word) * (2 * most + 1)) - most
            moves.append(whole if step["whole"] else either_way(word) * most)
        return x - moves[0], y - moves[1]
    if kind == "flip":
        if fraction(words[0]) >= step["chance"]:
            return x, y
        return (-x, y) if step["direction"] == "horizontal" else (x, -y)
    if kind == "rotate":
        angle = math.radians(float(either_way(words[0]) * Fraction(step["degrees"])))
        cosine, sine = Fraction(math.cos(angle)), Fraction(math.sin(angle))
        return cosine * x - sine * y, sine * x + cosine * y
    if kind == "scale":
        factor = 1 + either_way(words[0]) * Fraction(step["by"])
        return x / factor, y / factor
    if kind == "shear":
        return x - either_way(words[0]) * Fraction(step["by"]) * y, y
    return x + displaced[0], y + displaced[1]


def displacement(field, grid, axis, row, rows, column, columns):
    """A cubic B-spline through the grid, first across, then down the rows."""
    first_row, down = spline(row, rows, grid)
    first_column, across = spline(column, columns, grid)
    total = 0
    for i in range(4):
        line = sum(across[j] * field[first_row + i, first_column + j][axis] for j in range(4)) // 16384
        total += down[i] * line
    return total // 16384


def spline(place, length, grid):
    where = Fraction(2 * place + 1, 2 * length) * grid
    cell = math.floor(where)
    u = where - cell
    parts = (1 - u) ** 3, 4 - 6 * u**2 + 3 * u**3, 1 + 3 * u + 3 * u**2 - 3 * u**3, u**3
    return cell, [rounded(part / 6, 16384) for part in parts]


def crop(image, step, draw):
    _, rows, columns = size(image)
    new_rows, new_columns = step["rows"] or rows, step["columns"] or columns
    words, padding = draw(step, 2), step["padding"]
    left = math.floor(fraction(words[0]) * (columns + 2 * padding - new_columns + 1)) - padding
    top = math.floor(fraction(words[1]) * (rows + 2 * padding - new_rows + 1)) - padding
    return window(image, top, left, new_rows, new_columns, step["edge"])


def pad(image, step, draw):
    _, rows, columns = size(image)
    by = step["pixels"]
    return window(image, -by, -by, rows + 2 * by, columns + 2 * by, step["edge"])


def window(image, top, left, rows, columns, edge):
    return [
        [[pixel(image, k, top + r, left + c, edge) for c in range(columns)] for r in range(rows)]
        for k in range(len(image))
    ]


def levels(image, gains, offsets):
    def at(channel, value):
        changed = rounded(gains[channel]) * value + rounded(offsets[channel])
        return min(max((changed + 32768) // 65536, 0), 255)

    return [[[at(k, value) for value in row] for row in plane] for k, plane in enumerate(image)]


def brightness(image, step, draw):
    added = either_way(draw(step, 1)[0]) * Fraction(step["by"]) * 255
    return levels(image, [1] * len(image), [added] * len(image))


def contrast(image, step, draw):
    gain = 1 + either_way(draw(step, 1)[0]) * Fraction(step["by"])
    return levels(image, [gain] * len(image), [mean(image) * (1 - gain)] * len(image))


def normalise(image, step, draw):
    means, stds = step["mean"], step["std"]
    if means is None:
        means = mean(image)
        stds = math.sqrt(mean([[[(value - means) ** 2 for value in row] for row in p] for p in image]))
    means = [Fraction(value) for value in (means if isinstance(means, list) else [means] * len(image))]
    stds = [Fraction(value) for value in (stds if isinstance(stds, list) else [stds] * len(image))]
    gains = [step["to_std"] / std if std else 0 for std in stds]
    return levels(image, gains, [step["to_mean"] - m * gain for m, gain in zip(means, gains, strict=True)])


def mean(image):
    values = [value for plane in image for row in plane for value in row]
    return Fraction(sum(values)) / len(values)


def noise(image, step, draw):
    channels, rows, columns = size(image)
    words = draw(step, math.ceil(channels * rows * columns / 2))
    factor = round(step["levels"] / math.sqrt(65535 / 3) * 65536)

    def at(place, value):
        four = (words[place // 2] >> 32 * (place % 2)) % 2**32
        total = sum(four.to_bytes(4, "little")) - 510
        return min(max(value + (total * factor + 32768) // 65536, 0), 255)

    return [
        [[at((k * rows + r) * columns + c, image[k][r][c]) for c in range(columns)] for r in range(rows)]
        for k in range(channels)
    ]


def cutout(image, step, draw):
    _, rows, columns = size(image)
    word_of_row, word_of_column = draw(step, 2)
    side = step["pixels"]
    top = math.floor(fraction(word_of_row) * rows) - side // 2
    left = math.floor(fraction(word_of_column) * columns) - side // 2
    return [
        [
            [
                step["level"] if top <= r < top + side and left <= c < left + side else value
                for c, value in enumerate(row)
            ]
            for r, row in enumerate(plane)
        ]
        for plane in image
    ]
