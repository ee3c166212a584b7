"""How the learning rate changes over a run (Loshchilov and Hutter, arXiv 1608.03983, equation 5, after a warm-up)."""

import math


def warmup_cosine(step: int, *, peak: float, floor: float, warmup_steps: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (counted from 0): linear up to `peak`, then half a cosine to `floor`.

    Warm-up step i of w gets peak · (i + 1)/w, so that the very first step already learns and the last of the warm-up
    runs at `peak`.  The cosine starts there, and reaches `floor` at step `total_steps` - 1, the last of the run; past
    it the rate stays at `floor`.  Without warm-up step 0 is already the first step down the cosine, just below `peak`;
    with nothing but warm-up, `total_steps` = `warmup_steps`, there is no cosine.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps + 1) / max(total_steps - warmup_steps, 1)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
