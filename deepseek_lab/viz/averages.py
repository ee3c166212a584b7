"""Why a mean of means misleads: ranks as bars whose width is their tokens and whose height is their mean loss."""

from deepseek_lab.viz import theme

BLUE, VERMILION, GREEN = theme.TONES[:3]


def draw_uneven_ranks(axes, tokens: int) -> None:
    """Four ranks as bars: width is tokens, height is mean loss; the two ways to average them as lines."""
    widths, heights = [400, 400, 400, tokens], [2.4, 2.6, 2.5, 6.0]
    starts = [sum(widths[:rank]) for rank in range(4)]
    right = sum(h * w for h, w in zip(heights, widths, strict=True)) / sum(widths)
    naive = sum(heights) / 4
    axes.bar(starts, heights, widths, align="edge", color=BLUE, alpha=0.3, edgecolor=theme.INK, linewidth=0.8)
    for rank, (start, width, height) in enumerate(zip(starts, widths, heights, strict=True)):
        axes.text(start + width / 2, height + 0.12 if rank == 3 else 1.1, f"rank {rank}", ha="center")
    axes.axhline(naive, color=VERMILION, linestyle="--", label=f"mean of the ranks' means: {naive:.2f}")
    axes.axhline(right, color=GREEN, label=f"mean over all tokens: {right:.2f}")
    axes.set(xlim=(0, 1650), ylim=(0, 7.4), xlabel="tokens, rank after rank", ylabel="loss (nats per token)")
    axes.set_title(f"{tokens} tokens on rank 3: the mean of means is off by {naive - right:+.2f}")
    axes.legend(loc="upper left", ncols=2)
