"""Dense retrieval: the cosine of the embeddings of query and passage, by exact search over all passages.

The embedding model is a folder or a name of the Hub, run by transformers. Texts are pooled as the model's own
sentence-transformers files say (mean of the tokens, or the first one); without these files, by the mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_agents.errors import ConfigError

BATCH = 64  # texts
LONGEST = 256  # tokens of a text
_COSINES = 2**26  # the most that are in memory at once
# The models of the E5 family were trained with these words before the text.
_PREFIXES = {"e5": ("query: ", "passage: ")}


class Encoder:
    """Turns texts into embeddings of length 1.

    Args:
        model: a model folder, or the name of a model of the Hub.
        device: "cpu", "cuda" or any other device of torch.

    Raises:
        ConfigError: torch or transformers is not installed, or the model cannot be loaded.
    """

    def __init__(self, model: str, *, device: str = "cpu") -> None:
        try:
            import torch
            from transformers import AutoModel, AutoTokenizer
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"dense retrieval needs {error.name}, which is not installed: "
                "pip install 'areal-agents[train]'"
            ) from None
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            self._model = AutoModel.from_pretrained(model).to(device).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"the embedding model {model} cannot be loaded: {error}") from error
        self._torch: Any = torch
        self._device = device
        self._takes_first_token = _takes_first_token(model)
        family = next((name for name in _PREFIXES if name in Path(model).name.lower()), None)
        self._query_prefix, self._passage_prefix = _PREFIXES[family] if family else ("", "")

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of queries, float32 [Q, D]."""
        return self._embed([self._query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of passages, float32 [N, D]."""
        return self._embed([self._passage_prefix + text for text in texts])

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        torch = self._torch
        lengths = [len(text) for text in texts]
        order = sorted(range(len(texts)), key=lengths.__getitem__)  # texts of one length need no padding
        parts = []
        with torch.inference_mode():
            for begin in range(0, len(texts), BATCH):
                batch = [texts[place] for place in order[begin : begin + BATCH]]
                inputs = self._tokenizer(
                    batch, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
                ).to(self._device)
                hidden = self._model(**inputs).last_hidden_state  # [B, T, D]
                if self._takes_first_token:
                    pooled = hidden[:, 0]
                else:
                    mask = inputs["attention_mask"][..., None].to(hidden.dtype)
                    pooled = (hidden * mask).sum(1) / mask.sum(1)
                parts.append(torch.nn.functional.normalize(pooled.float(), dim=-1).cpu().numpy())
        found = np.concatenate(parts)
        result = np.empty_like(found)
        result[order] = found
        return result


def _takes_first_token(model: str) -> bool:
    """Whether the model's sentence-transformers files say that the first token is the embedding."""
    file = Path(model) / "1_Pooling" / "config.json"
    if not file.is_file():
        from transformers.utils import cached_file  # a model of the Hub; None if it has no such file

        found = (
            None
            if Path(model).is_dir()
            else cached_file(model, "1_Pooling/config.json", _raise_exceptions_for_missing_entries=False)
        )
        if found is None:
            return False
        file = Path(found)
    return bool(json.loads(file.read_text())["pooling_mode_cls_token"])


def embed_corpus(encoder: Encoder, texts: Iterator[str], passages: int, path: Path) -> Iterator[int]:
    """Write the embeddings of all passages as float16 [N, D], and yield how many are done after each part."""
    done, array = 0, None
    part: list[str] = []
    for number, text in enumerate(texts, start=1):
        part.append(text)
        if len(part) == BATCH * 16 or number == passages:
            found = encoder.passages(part)
            if array is None:
                array = np.lib.format.open_memmap(
                    path, mode="w+", dtype=np.float16, shape=(passages, found.shape[1])
                )
            array[done : done + len(part)] = found
            done += len(part)
            part = []
            yield done
    if array is not None:
        array.flush()


class Dense:
    """Exact search over the embeddings of all passages, on one device.

    Args:
        path: what `embed_corpus` wrote.
    """

    def __init__(self, path: Path, encoder: Encoder, *, device: str = "cpu") -> None:
        import torch

        half = torch.from_numpy(np.load(path))
        self._torch: Any = torch
        # A CPU multiplies float32 several times faster than float16.
        self._passages = (half.float() if device == "cpu" else half.to(device)).contiguous()  # [N, D]
        self._encoder = encoder

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """Return the best k (row, cosine) of each query, the best first; equal cosines by row."""
        torch = self._torch
        each = max(1, _COSINES // len(self._passages))
        with torch.inference_mode():
            embedded = torch.from_numpy(self._encoder.queries(queries)).to(self._passages)
            best = [
                (part @ self._passages.T).topk(min(k, len(self._passages)), dim=-1)
                for part in embedded.split(each)
            ]
        rows = [of_query for part in best for of_query in part.indices.tolist()]
        scores = [of_query for part in best for of_query in part.values.tolist()]
        return [
            sorted(zip(of_query, their_scores, strict=True), key=lambda pair: (-pair[1], pair[0]))
            for of_query, their_scores in zip(rows, scores, strict=True)
        ]
