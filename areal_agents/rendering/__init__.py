"""Converts messages to token ids and back in the model's own chat format, without torch or transformers."""

from areal_agents.rendering.chat import ChatRenderer
from areal_agents.rendering.streaming import Delta, ReplyStream
from areal_agents.rendering.tokenization.tokenizer import Tokenizer

__all__ = ["ChatRenderer", "Delta", "ReplyStream", "Tokenizer"]
