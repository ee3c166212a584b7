"""Pictures of chapter 05: how ranks share out a bucket, what each holds, and when weights are whole."""

from collections.abc import Mapping, Sequence
from typing import Any

from deepseek_lab.plan import memory
from deepseek_lab.viz import theme

KINDS = ("parameters", "gradients", "optimizer")
BLUE, VERMILION, GREEN = theme.TONES[:3]


def draw_cuts(axes: Any, numels: Sequence[int], n_ranks: int) -> None:
    """Parameters of `numels` numbers, one after the other, and where the shares of `n_ranks` begin and end."""
    total = sum(numels)
    share = -(-total // n_ranks)
    offset = 0
    for i, numel in enumerate(numels):
        axes.barh(0, numel, left=offset, height=0.5, color=theme.TONES[i % 6], edgecolor="white", linewidth=0.5)
        axes.text(offset + min(numel, 4) / 2, 0, f"{i}", ha="center", va="center", color="white", fontsize=9)
        offset += numel
    padding = share * n_ranks - total
    if padding:
        axes.barh(0, padding, left=total, height=0.5, color="none", edgecolor=theme.INK, hatch="////", linewidth=0.5)
    for rank in range(n_ranks):
        axes.axvline(rank * share, ymin=0.15, ymax=0.85, color=theme.INK, linewidth=1.5)
        axes.text((rank + 0.5) * share, 0.45, f"rank {rank}", ha="center", va="bottom", fontsize=9)
    axes.axvline(n_ranks * share, ymin=0.15, ymax=0.85, color=theme.INK, linewidth=1.5)
    axes.set(xlim=(-0.5, n_ranks * share + 0.5), ylim=(-0.5, 0.8), yticks=[], xlabel="place in the bucket (numbers)")
    axes.spines["left"].set_visible(False)
    axes.set_title(f"{total} numbers of {len(numels)} parameters on {n_ranks} ranks, {padding} of padding")


def draw_state(axes: Any, measured: Mapping[str, Mapping[str, int]], formula: Mapping[str, Mapping[str, int]]) -> None:
    """Bytes of one rank by kind, as bars, {name: {kind: bytes}}, and what a formula says, as marks on top."""
    for x, name in enumerate(measured):
        bottom = 0.0
        for kind, tone in zip(KINDS, theme.TONES, strict=False):
            size = measured[name][kind] / 2**20
            axes.bar(x, size, bottom=bottom, width=0.6, color=tone, label=kind if x == 0 else None)
            bottom += size
        top = sum(formula[name].values()) / 2**20
        label = "the formula" if x == 0 else None
        axes.plot([x - 0.4, x + 0.4], [top, top], color=theme.INK, linewidth=2, linestyle=":", label=label)
        axes.text(x, top, f"{bottom:.2f}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(measured)), list(measured))
    axes.set_ylabel("state of one rank (MiB)")
    axes.legend(loc="upper right")


def draw_whole_weights(axes: Any, spans: Sequence[tuple[str, float, float, float]], forward_ends_s: float) -> None:
    """When each unit's weights were on their way and whole: (name, gather starts, is complete, freed), seconds."""
    names = list(dict.fromkeys(name for name, *_ in spans))
    for name, starts, complete, freed in spans:
        y = names.index(name)
        axes.barh(y, (complete - starts) * 1e3, left=starts * 1e3, height=0.3, color=VERMILION)
        axes.barh(y, (freed - complete) * 1e3, left=complete * 1e3, height=0.6, color=BLUE)
    axes.barh(0, 0, color=VERMILION, label="on their way")
    axes.barh(0, 0, color=BLUE, label="whole")
    axes.axvline(forward_ends_s * 1e3, color=theme.INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("time in one pass (ms); the dotted line is where backward begins")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_memory(axes: Any, parameters_b: float, gpus: int, precision: str) -> None:
    """State of one GPU under every stage, beside the memory of common ones."""
    n_params, sizes_of = int(parameters_b * 1e9), memory.STATE_BYTES[precision]
    sizes = [memory.zero_state_bytes(n_params, gpus, stage, *sizes_of) for stage in range(4)]
    for kind, tone in zip(KINDS, theme.TONES, strict=False):
        below = [sum(size[k] for k in KINDS[: KINDS.index(kind)]) / 1e9 for size in sizes]
        axes.barh(range(4), [size[kind] / 1e9 for size in sizes], left=below, color=tone, label=kind, height=0.6)
    for stage, size in enumerate(sizes):
        axes.text(sum(size.values()) / 1e9, stage, f" {sum(size.values()) / 1e9:,.1f} GB", va="center", fontsize=9)
    for memory_gb, name in ((80, "H100: 80 GB"), (141, "H200: 141 GB")):
        axes.axvline(memory_gb, color=theme.INK, linewidth=1, linestyle=":")
        axes.text(memory_gb, -0.62, name, ha="center", va="bottom", fontsize=8)
    axes.set_yticks(range(4), [f"stage {stage}" for stage in range(4)])
    axes.set_xlim(0, max(sum(sizes[0].values()) / 1e9 * 1.2, 160))
    axes.invert_yaxis()
    axes.set_xlabel("state of one GPU (GB), activations not counted")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
