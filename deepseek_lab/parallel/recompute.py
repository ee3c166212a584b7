"""Activation recomputation: forget what forward worked out, and work it out again in backward (arXiv 1604.06174).

"full" keeps only the input of every block and costs one more forward.  "selective" works out again only what is large
and cheap: the keys and values of all heads, expanded from MLA's small latent, and attention over them (in the spirit of
Korthikanti et al., arXiv 2205.05198, section 5).  Nothing that "selective" repeats communicates;
a whole block sends again what it sent in forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from torch import nn
from torch.utils.checkpoint import checkpoint

from deepseek_lab.model import DeepSeekModel, moe, split_backward


def apply_recompute(model: DeepSeekModel, mode: str) -> None:
    """Recompute nothing ("none"), attention ("selective") or whole blocks ("full") of `model` in backward."""
    for block in model.blocks() if mode != "none" else []:
        module: nn.Module = block if mode == "full" else block.self_attn  # type: ignore[assignment]
        name = "forward" if mode == "full" else "_attend_expanded"
        setattr(module, name, functools.partial(_recomputed, module, getattr(module, name)))


@contextlib.contextmanager
def _repeated(deferrable: bool) -> Iterator[None]:
    """A repeated pass is no second visit to an expert, and its backward is split if that of the first was to be."""
    with moe.not_counting(), split_backward.deferrable(deferrable):
        yield


def _contexts(deferrable: bool):
    return contextlib.nullcontext(), _repeated(deferrable)


def _recomputed(module: nn.Module, function, *args, **kwargs):
    if not module.training:
        return function(*args, **kwargs)
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing here is drawn at random
        context_fn=functools.partial(_contexts, split_backward.is_deferrable()),
        **kwargs,
    )
