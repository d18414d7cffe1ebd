"""Benchmark runs: engines side by side on every workload, as shares of what the machine allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import Rectangle

from llmlab.viz.style import INK, SERIES, SOFT, engineering, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from llmlab.bench.result import BenchResult
    from llmlab.measure.datasheets import Roof

ENGINE_LOOKS = {  # colour and hatch, the same in every figure
    "llmlab": (SERIES[0], ""),
    "hf": (SERIES[4], "///"),
    "llamacpp": (SERIES[2], "\\\\\\"),
    "vllm": (SERIES[3], "..."),
    "openvino": (SERIES[1], "xxx"),
}


@styled
def bench_figure(result: BenchResult, title: str = "") -> Figure:
    """A group of bars a workload, one bar an engine: its share of the machine's floor, lowest to highest as a line, the median
    tokens/s as a number."""
    table = result.table()
    floors = table["workload"].map(result.floors)
    table = table.assign(
        low=table["lowest"] / floors, high=table["highest"] / floors, share=table["tokens_per_s"] / floors
    )
    workloads = list(dict.fromkeys(table["workload"]))
    engines = [engine.name for engine in result.engines]
    fig = new_figure(max(6.5, 1.2 + 0.42 * len(workloads) * (len(engines) + 1)), 4.8)
    axis = fig.subplots()
    width = 0.84 / len(engines)
    for i, engine in enumerate(engines):
        colour, hatch = ENGINE_LOOKS[engine]
        rows = table[table["engine"] == engine]
        at = [workloads.index(w) + (i - (len(engines) - 1) / 2) * width for w in rows["workload"]]
        axis.bar(
            at, 100 * rows["share"], width, color=colour, hatch=hatch, edgecolor="white", label=_label(result, engine)
        )
        axis.vlines(at, 100 * rows["low"], 100 * rows["high"], color=INK, linewidth=1.2)
        for x, row in zip(at, rows.itertuples(), strict=True):
            axis.annotate(
                engineering(row.tokens_per_s),
                (x, 100 * row.high),
                (0, 3),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=8,
                color=INK,
            )
    labels = [f"{w}\n100 % = {engineering(result.floors[w])}" for w in workloads]
    axis.set_xticks(range(len(workloads)), labels, fontsize=8.5)
    axis.set_ylim(0, max(axis.get_ylim()[1] * 1.12, 100 * table["high"].max() * 1.22))
    axis.grid(axis="x", visible=False)
    axis.set_ylabel("% of what the machine allows\n(number: median tokens/s)")
    axis.set_title(title or f"{result.model}, {result.dtype}: engines in turns, {result.date[:10]}")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), title="engine, peak memory")
    return fig


def _label(result: BenchResult, engine: str) -> str:
    peak = next(e.peak_memory for e in result.engines if e.name == engine)
    kind = f" ({result.quantization})" if engine == "llmlab" and result.quantization else ""
    return f"{engine}{kind}  {engineering(peak, 'B')}"


PART_LOOKS = {
    "forward": (SERIES[0], ""),
    "logits": (SERIES[4], "///"),
    "sample": (SERIES[1], "xxx"),
    "schedule": (SERIES[2], "\\\\\\"),
    "batch": (SERIES[3], "..."),
    "detokenize": (SERIES[5], "++"),
    "update": (SERIES[6], "--"),
    "output": (SOFT, "oo"),
}


@styled
def step_split_figure(table: pd.DataFrame, title: str) -> Figure:
    """Where a decode step's time goes: one bar a number of sequences, in parts; beside it the parts that are not the model's.

    Args:
        table: columns num_reqs, part, seconds, share, as :func:`llmlab.measure.experiments.step_split.step_split` makes it.
    """
    parts = [part for part in PART_LOOKS if part in set(table["part"])]
    sizes = list(dict.fromkeys(table["num_reqs"]))
    fig = new_figure(10.0, 4.4)
    whole, rest = fig.subplots(1, 2, width_ratios=(1, 1))
    for axis, chosen in ((whole, parts), (rest, [p for p in parts if p not in MODEL_PARTS])):
        below = dict.fromkeys(sizes, 0.0)
        for part in chosen:
            colour, hatch = PART_LOOKS[part]
            rows = table[table["part"] == part].set_index("num_reqs")["share"] * 100
            axis.bar(
                range(len(sizes)),
                [rows[n] for n in sizes],
                0.6,
                bottom=[below[n] for n in sizes],
                color=colour,
                hatch=hatch,
                edgecolor="white",
                label=part,
            )
            below = {n: below[n] + rows[n] for n in sizes}
        totals = table.groupby("num_reqs")["seconds"].sum()
        for i, n in enumerate(sizes):
            text = f"{1e3 * totals[n]:.1f} ms" if axis is whole else f"{below[n]:.1f} %"
            axis.annotate(text, (i, below[n]), (0, 3), textcoords="offset points", ha="center", fontsize=9)
        axis.set_xticks(range(len(sizes)), [str(n) for n in sizes])
        axis.set_xlabel("sequences in the step")
        axis.margins(y=0.12)
        axis.grid(axis="x", visible=False)
    whole.set_ylabel("% of the step")
    whole.set_title("the whole step")
    rest.set_title("all but the model")
    handles, labels = whole.get_legend_handles_labels()
    fig.legend(handles[::-1], labels[::-1], loc="outside right center")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return fig


MODEL_PARTS = ("forward", "logits")


PATH_LOOKS = ("o", "s", "^", "D", "v")


@styled
def memory_order_figure(table: pd.DataFrame, title: str) -> Figure:
    """Where the weights stand in memory: the colour of an element is its place, darker is earlier.

    Args:
        table: columns layout, out, in, position, as :func:`llmlab.measure.experiments.cpu_paths.memory_order` makes it.
    """
    layouts = list(dict.fromkeys(table["layout"]))
    fig = new_figure(9.0, 5.2)
    axes = fig.subplots(1, len(layouts), sharey=True)
    words = {
        "rows": "as stored: output after output\none load: 16 inputs of one output,\nto be summed across the lanes",
        "panels": "packed: panels of 16 outputs\none load: one input of 16 outputs,\nno sum across lanes",
    }
    for axis, layout in zip(axes, layouts, strict=True):
        grid = table[table["layout"] == layout].pivot(index="out", columns="in", values="position")
        image = axis.imshow(grid.to_numpy(), cmap="viridis", aspect="auto")
        first = table[(table["layout"] == layout) & (table["position"] < 16)]
        left, top = first["in"].min() - 0.5, first["out"].min() - 0.5
        width, height = first["in"].max() + 0.5 - left, first["out"].max() + 0.5 - top
        axis.add_patch(Rectangle((left, top), width, height, fill=False, edgecolor=SERIES[1], linewidth=3))
        axis.set_title(words[layout], fontsize=10, fontweight="normal")
        axis.set_xlabel("input feature")
        axis.grid(visible=False)
        for edge in range(16, len(grid), 16):
            axis.axhline(edge - 0.5, color="white", linewidth=0.8)
    axes[0].set_ylabel("output feature")
    fig.colorbar(image, ax=axes, label="position in memory (elements); framed: the first vector load")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return fig


@styled
def paths_figure(table: pd.DataFrame, roof: Roof, title: str) -> Figure:
    """The matrix product in several ways: bytes/s of weights where few tokens read them, FLOP/s where many use them.

    Args:
        table: columns tokens, path, seconds, low, high, flops, weight_bytes. roof: the machine's.
    """
    fig = new_figure(10.5, 4.4)
    axes = fig.subplots(1, 2)
    kinds = (("weight_bytes", 1e9, roof.bandwidth, "GB/s of weights"), ("flops", 1e12, roof.flops, "TFLOP/s"))
    for axis, (column, unit, limit, label) in zip(axes, kinds, strict=True):
        for i, (path, rows) in enumerate(table.groupby("path", sort=False)):
            rate = rows[column] / unit
            spread = [rate / rows["seconds"] - rate / rows["high"], rate / rows["low"] - rate / rows["seconds"]]
            looks = {"marker": PATH_LOOKS[i % len(PATH_LOOKS)], "color": SERIES[i % len(SERIES)], "capsize": 3}
            axis.errorbar(
                rows["tokens"], rate / rows["seconds"], yerr=[s.clip(lower=0) for s in spread], label=path, **looks
            )
        axis.axhline(limit / unit, color=INK, linestyle="--", linewidth=1.2)
        above = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        axis.annotate(f"measured limit {engineering(limit / unit)}", (1, limit / unit), (0, 3), fontsize=8.5, **above)
        axis.set_xscale("log", base=2)
        sizes = sorted(set(table["tokens"]))
        axis.set_xticks(sizes, [str(n) for n in sizes])
        axis.set_xlabel("tokens in the step")
        axis.set_ylabel(label)
        axis.set_ylim(0, max(axis.get_ylim()[1], 1.12 * limit / unit))
    axes[0].legend(loc="best")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return fig


@styled
def variants_figure(table: pd.DataFrame, title: str) -> Figure:
    """The engine in several settings: milliseconds of each kind of work, and what the roof predicts as a tick.

    Args:
        table: columns work, size, variant, seconds, low, high, predicted.
    """
    works = list(dict.fromkeys(zip(table["work"], table["size"], strict=True)))
    variants = list(dict.fromkeys(table["variant"]))
    fig = new_figure(max(6.0, 2.3 * len(works)), 3.9)
    axes = fig.subplots(1, len(works), squeeze=False)[0]
    for axis, (work, size) in zip(axes, works, strict=True):
        rows = table[(table["work"] == work) & (table["size"] == size)].set_index("variant").loc[variants]
        milli = rows[["seconds", "low", "high", "predicted"]] * 1e3
        for i, variant in enumerate(variants):
            looks = {"color": SERIES[i % len(SERIES)], "hatch": ("", "///", "xxx", "...")[i % 4], "edgecolor": "white"}
            axis.bar(i, milli["seconds"][variant], 0.66, **looks)
        axis.vlines(range(len(variants)), milli["low"], milli["high"], color=INK, linewidth=1.2)
        left, right = ([i + side for i in range(len(variants))] for side in (-0.4, 0.4))
        axis.hlines(milli["predicted"], left, right, color=SERIES[5], linewidth=3, label="the roof's prediction")
        axis.set_xticks(range(len(variants)), variants, rotation=30, ha="right", fontsize=8.5)
        axis.set_title(f"decode, {size} seq." if work == "decode" else f"prefill {size}")
        axis.set_ylim(0, None)
        axis.grid(axis="x", visible=False)
    axes[0].set_ylabel("ms")
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left")
    fig.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return fig
