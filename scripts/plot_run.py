#!/usr/bin/env python3
"""Draws loss.svg from a run's metrics.csv: the loss of every step, its moving average, and held-out losses where there are any.

plot_run.py RUN_DIR [--out FILE]

The program itself draws nothing: it needs no Python, and this script needs nothing but Python's standard library.
"""
import argparse
import csv
import html
import math
import os
import pathlib
import sys

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 72, 20, 48, 56
MAX_POINTS = 4000  # more than pixels would only make the file large

# Plain colours, overridden where the reader prefers dark: viewers without CSS variables draw it too.
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .title { font-size: 16px; font-weight: 600; }
  .paper { fill: #ffffff; }
  .grid { stroke: #d0d7de; stroke-width: 1; }
  .axis { stroke: #1f2328; stroke-width: 1.2; fill: none; }
  .raw { stroke: #9ec5f0; stroke-width: 1; fill: none; }
  .mean { stroke: #0b5cad; stroke-width: 2.2; fill: none; stroke-linejoin: round; }
  .held { stroke: #b3440c; stroke-width: 1.6; fill: none; }
  .point { fill: #b3440c; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .paper { fill: #0d1117; }
    .grid { stroke: #30363d; }
    .axis { stroke: #e6edf3; }
    .raw { stroke: #2f5580; }
    .mean { stroke: #6cb2ff; }
    .held { stroke: #ff9a57; }
    .point { fill: #ff9a57; }
  }
"""


def number(text):
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def read(metrics):
    """(step, loss) of every row and (step, eval_loss) where one stands; what is not finite leaves a gap."""
    with open(metrics, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    points = [(number(r.get("step")), number(r.get("loss"))) for r in rows]
    held = [(number(r.get("step")), number(r.get("eval_loss"))) for r in rows]
    return [p for p in points if p[0] is not None], [p for p in held if None not in p]


def smoothed(points):
    """Moving average of the finite losses over a twentieth of the run, drawn at the middle of its window so that it does not lag."""
    window = max(1, len(points) // 20)
    finite = [p for p in points if p[1] is not None]
    out = []
    for end in range(1, len(finite) + 1):
        inside = finite[max(0, end - window) : end]
        out.append((sum(s for s, _ in inside) / len(inside), sum(v for _, v in inside) / len(inside)))
    return out, window


def ticks(low, high, wanted):
    """Round numbers (1, 2 or 5 times a power of ten) from low to high."""
    step = 10 ** math.floor(math.log10((high - low) / wanted))
    while (high - low) / step > wanted:
        step *= 2.5 if str(step).lstrip("0.")[0] == "2" else 2
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value):
    return f"{value:.10g}"


def path(points, x, y):
    pieces, pen = [], "M"
    for step, loss in points:
        if loss is None:
            pen = "M"
            continue
        pieces.append(f"{pen}{x(step):.1f} {y(loss):.1f}")
        pen = "L"
    return "".join(pieces)


def thinned(points):
    stride = max(1, -(-len(points) // MAX_POINTS))
    kept = points[::stride]
    return kept if kept[-1:] == points[-1:] else kept + points[-1:]


def svg(points, held, title):
    mean, window = smoothed(points)
    losses = [v for _, v in points if v is not None] + [v for _, v in held]
    if not losses:
        raise SystemExit("plot_run: no finite loss to draw")
    low, high = min(losses), max(losses)
    margin = 0.05 * (high - low) or max(abs(high), 1.0) * 0.05
    low, high = low - margin, high + margin
    steps = [s for s, _ in points]
    first, last = min(steps), max(steps)
    if first == last:
        first, last = first - 1, last + 1

    def x(step):
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(loss):
        return HEIGHT - BOTTOM - (loss - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">',
        f"<title>{html.escape(title)}: loss by step</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="26">{html.escape(title)}</text>',
    ]
    for value in ticks(low, high, 8):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(value) + 4.5:.1f}" text-anchor="end">{label(value)}</text>')
    for value in ticks(first, last, 10):
        if value != int(value):
            continue
        out.append(f'<line class="axis" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}"/>')
        out.append(f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{label(value)}</text>')
    out.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">step</text>')
    out.append(f'<text transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">loss (nats a token)</text>')
    out.append(f'<path class="raw" d="{path(thinned(points), x, y)}"/>')
    out.append(f'<path class="mean" d="{path(thinned(mean), x, y)}"/>')
    if held:
        out.append(f'<path class="held" d="{path(held, x, y)}"/>')
        out += [f'<circle class="point" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3.5"/>' for s, v in held]
    legend = [("raw", "each step"), ("mean", f"mean of {window} steps" if window > 1 else "mean")]
    legend += [("held", "held-out")] if held else []
    at = WIDTH - RIGHT - 150 * len(legend)
    for name, text in legend:
        out.append(f'<line class="{name}" x1="{at}" x2="{at + 24}" y1="21" y2="21"/><text x="{at + 30}" y="26">{text}</text>')
        at += 150
    out.append("</svg>\n")
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir")
    parser.add_argument("--out", help="default: RUN_DIR/loss.svg")
    arguments = parser.parse_args()
    run = pathlib.Path(arguments.run_dir)
    try:
        points, held = read(run / "metrics.csv")
    except OSError as error:
        raise SystemExit(f"plot_run: {error.filename}: {error.strerror}") from error
    target = pathlib.Path(arguments.out) if arguments.out else run / "loss.svg"
    beside = target.with_name(target.name + ".part")
    beside.write_text(svg(points, held, run.resolve().name), encoding="utf-8")
    os.replace(beside, target)  # a viewer never sees half a picture
    return 0


if __name__ == "__main__":
    sys.exit(main())
