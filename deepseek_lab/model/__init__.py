"""Serial PyTorch model code: one file a concept, no rank in sight."""

from deepseek_lab.model.config import DeepSeekConfig
from deepseek_lab.model.transformer import DeepSeekModel

__all__ = ["DeepSeekConfig", "DeepSeekModel"]
