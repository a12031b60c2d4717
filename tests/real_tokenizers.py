"""The real Qwen vocabulary for tests: the folder that the benchmark uses too."""

from benchmarks.proxy.qwen_vocabulary import QWEN2_TEMPLATE, QWEN3_TEMPLATE, qwen_folder

__all__ = ["QWEN2_TEMPLATE", "QWEN3_TEMPLATE", "qwen_folder"]
