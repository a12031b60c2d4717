"""Continuous batching: chooses the rows that each step computes, and applies the tokens that it samples.

A step takes the next token of every decoding slot and as many prompt tokens as the budget allows, runs them
in one forward pass, and samples for the slots whose last token was among them. Prompts and decodes are
treated alike: both are slots whose `valid` is less than their `length`.

Invariant: a token is sampled only when the keys and values of everything before it are valid under the
current weights, or the slot continued over an in-place swap.

A step computes the slots of one model only, the base or an adapter's; models take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
import torch

from areal_agents.inference.embedded.model.model_set import ModelSet
from areal_agents.inference.embedded.model.runner import ModelRunner, Rows
from areal_agents.inference.embedded.model.weights import Weights
from areal_agents.inference.embedded.scheduling.batch import SlotSampling
from areal_agents.inference.embedded.scheduling.request import Finish, Request
from areal_agents.inference.embedded.scheduling.sampling import best_tokens, score_tokens
from areal_agents.inference.embedded.scheduling.slots import SlotTable
from areal_agents.inference.engine import MemoryKind, PauseMode

StopMatcher = Callable[[np.ndarray, tuple[str, ...]], str | None]


class Scheduler:
    """Requests, slots and the runner. Not thread-safe: `worker.EngineThread` alone calls it.

    Args:
        find_stop: (output ids, stop strings) → the stop string that their text contains, if any.
        version: the weights' version on the wire.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        slots: int,
        max_context: int,
        prefill_tokens: int,
        prefix_cache: bool,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        find_stop: StopMatcher,
        version: str,
    ) -> None:
        self.version = version
        self.paused: PauseMode | None = None
        self.models = ModelSet(runner)
        self._runner = runner
        self._table = SlotTable(slots, max_context)
        self._sampling = SlotSampling(slots, max_context, vocab_size, eos_ids)
        self._prefill_tokens = prefill_tokens
        self._prefix_cache = prefix_cache
        self._find_stop = find_stop
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._watched: set[int] = set()  # slots whose requests stream or have stop strings
        self._scored: set[int] = set()  # slots whose prompt logprobs are still being computed
        self._prompt_only: set[int] = set()  # slots whose requests end with their prompt
        self._constrained: set[int] = set()  # slots whose requests must match a grammar
        self._ranked: set[int] = set()  # slots whose requests list the best tokens at each position
        self._when_idle: deque[Callable[[], None]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something now."""
        if self.paused is not None or self.models.without:
            return bool(self._when_idle)
        return bool(self._running or self._waiting or self._when_idle)

    @property
    def load(self) -> dict[str, int]:
        """The numbers of running and waiting requests."""
        return {"running": len(self._running), "waiting": len(self._waiting)}

    def add(self, request: Request) -> None:
        """Queue a request; its rid must not be in use."""
        self._waiting.append(request)

    def abort(self, rid: str | None) -> None:
        """End the request `rid`, or all. An unknown rid is no error: the request may have finished."""
        for slot, request in list(self._running.items()):
            if rid is None or request.rid == rid:
                self._finish(slot, Finish("abort", message="aborted"))
        for request in [r for r in self._waiting if rid is None or r.rid == rid]:
            self._waiting.remove(request)
            request.mark_version(self.version, len(request.output_ids))
            request.finish = Finish("abort", message="aborted")
            request.publish()
        self._drop_retired()

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling until `resume`; see Engine.pause."""
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for slot in reversed(list(self._running)):
                self._retract(slot)
        self.paused = mode

    def resume(self) -> None:
        """Continue after `pause`."""
        self.paused = None

    def when_idle(self, action: Callable[[], None]) -> None:
        """Run `action` between steps: at once while paused, otherwise when the running requests have
        finished.

        New requests are held until then.
        """
        self._when_idle.append(action)

    def use_version(self, version: str) -> None:
        """Tokens sampled from now on carry `version`."""
        self.version = version
        for slot, request in self._running.items():
            request.mark_version(version, int(self._table.length[slot]) - len(request.prompt))

    def weights_changed(self) -> None:
        """Invalidate all cached keys and values after a change of weights."""
        self._table.invalidate()

    def replace_models(self, models: Mapping[int, Weights]) -> None:
        """See ModelSet.replace."""
        self.models.replace(models)
        self.weights_changed()

    def retire_model(self, number: int, dropped: Callable[[], None]) -> None:
        """Drop a model, which no new request may use, once those that do have ended; then call `dropped`."""
        self.models.retire(number, dropped)
        self._drop_retired()

    def release(self, kinds: set[MemoryKind]) -> bool:
        """Release memory, and sample nothing until it is allocated again; return False while requests run."""
        if self._running:
            return False
        if "kv_cache" in kinds:
            self._table.forget_idle()
        self.models.release(kinds)
        return True

    def flush_cache(self) -> bool:
        """Drop the prefix cache; False (and nothing done) while requests run."""
        if self._running:
            return False
        self._table.forget_idle()
        return True

    def step(self) -> None:
        """Admit requests, compute one batch, sample, and deliver finished requests."""
        if self._when_idle and (self.paused is not None or not self._running):
            while self._when_idle:
                self._when_idle.popleft()()
        if self.paused is not None or self.models.without:
            return
        if not self._when_idle:
            self._admit()
        if not self._running:
            return
        slots, counts = self._plan()
        complete = self._table.valid[slots] + counts == self._table.length[slots]
        rows = self._rows(slots, counts, complete)
        logits = self._runner.forward(rows)
        self._table.valid[slots] += counts
        if self._scored:
            logits = self._score_prompts(rows, logits, (rows.segment_starts[1:] - 1)[complete])
        done = slots[complete]
        if self._prompt_only:
            done, logits = self._end_prompts(done, logits)
        if len(done):
            self._commit(done, logits)
        self._drop_retired()

    def _admit(self) -> None:
        while self._waiting and self._table.free:
            request = self._waiting[0]
            scored = request.input_logprobs_from >= 0 and not request.prompt_scored
            ids = np.concatenate([request.prompt, request.output_ids])
            reuse = len(ids) - 1 if self._prefix_cache else 0
            if scored:
                reuse = min(reuse, request.input_logprobs_from)
            place = self._table.take(ids, max_reuse=reuse, model=request.model)
            if place is None:
                return
            self._waiting.popleft()
            if place.source != place.slot:
                self._runner.copy_prefix(place.source, place.slot, place.reused)
            if not request.retractions:
                request.cached_tokens = place.reused
            if scored:
                size, top = len(request.prompt), request.input_top
                request.input_logprobs = np.full(size, np.nan, np.float32)
                request.input_top_ids = np.zeros((size, top), np.int32)
                request.input_top_logprobs = np.full((size, top), np.nan, np.float32)
                self._scored.add(place.slot)
            if request.prompt_only:
                self._prompt_only.add(place.slot)
            request.mark_version(self.version, len(request.output_ids))
            self._sampling.assign(place.slot, request)
            self._running[place.slot] = request
            if request.streaming or request.sampling.stop:
                self._watched.add(place.slot)
            if request.matcher is not None:
                self._constrained.add(place.slot)
            if request.sampling.top_logprobs:
                self._ranked.add(place.slot)

    def _drop_retired(self) -> None:
        if self.models.is_retiring:
            requests = (*self._running.values(), *self._waiting)
            self.models.drop_retired({request.model for request in requests})

    def _plan(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of this step, and the number of tokens that each computes.

        Decodes come first, then prompts within the budget.
        """
        slots = np.fromiter(self._running, np.int32, len(self._running))
        numbers = self._table.model[slots]
        slots = slots[numbers == self.models.take_turn(numbers)]
        pending = self._table.length[slots] - self._table.valid[slots]
        if (pending == 1).all():
            return slots, pending
        budget = self._prefill_tokens
        counts = np.minimum(pending, 1)
        for i in np.flatnonzero(pending > 1):
            counts[i] = min(int(pending[i]), budget)
            budget -= int(counts[i])
        return slots[counts > 0], counts[counts > 0]

    def _rows(self, slots: np.ndarray, counts: np.ndarray, complete: np.ndarray) -> Rows:
        """Return the rows of the step; outputs are each complete slot's last row, and scored prompt rows."""
        table = self._table
        starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        if starts[-1] == len(slots):
            row_slots, positions = slots, table.valid[slots]
        else:
            row_slots = np.repeat(slots, counts)
            first = np.repeat(table.valid[slots] - starts[:-1], counts)
            positions = first + np.arange(starts[-1], dtype=np.int32)
        outputs = (starts[1:] - 1)[complete]
        if self._scored:
            wanted = [scored for _, scored, _ in self._scored_rows(row_slots, positions)]
            outputs = np.unique(np.concatenate([outputs, *wanted])).astype(np.int32)
        return Rows(
            tokens=table.tokens[row_slots, positions],
            slots=row_slots,
            positions=positions,
            prefix_slots=table.prefix_slot[row_slots],
            prefix_lengths=table.prefix_length[row_slots],
            segment_starts=starts,
            outputs=outputs,
        )

    def _scored_rows(
        self, row_slots: np.ndarray, positions: np.ndarray
    ) -> list[tuple[Request, np.ndarray, np.ndarray]]:
        """Return (request, rows [n], prompt positions that they predict [n]) for each request whose prompt
        logprobs are being computed."""
        found = []
        for slot in self._scored:
            request = self._running[slot]
            rows = np.flatnonzero(row_slots == slot)
            predicted = positions[rows] + 1
            wanted = (predicted > request.input_logprobs_from) & (predicted < len(request.prompt))
            found.append((request, rows[wanted], predicted[wanted]))
        return found

    def _score_prompts(self, rows: Rows, logits: torch.Tensor, last_rows: np.ndarray) -> torch.Tensor:
        """Fill in prompt logprobs (at temperature 1, as SGLang does); return the logits of `last_rows`."""
        for request, scored, predicted in self._scored_rows(rows.slots, rows.positions):
            assert request.input_logprobs is not None
            assert request.input_top_ids is not None and request.input_top_logprobs is not None
            found = score_tokens(
                logits[torch.from_numpy(np.searchsorted(rows.outputs, scored))],
                request.prompt[predicted],
                request.input_top,
            )
            request.input_logprobs[predicted] = found[0]
            request.input_top_ids[predicted], request.input_top_logprobs[predicted] = found[1:]
        for slot in self._scored.intersection(rows.slots[last_rows].tolist()):
            self._running[slot].prompt_scored = True
            self._scored.remove(slot)
        return logits[torch.from_numpy(np.searchsorted(rows.outputs, last_rows))]

    def _end_prompts(self, slots: np.ndarray, logits: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        """Finish the `slots` [M] that only compute their prompt; return the others with their logits."""
        ends = np.isin(slots, list(self._prompt_only))
        for slot in slots[ends].tolist():
            self._finish(slot, Finish("length"))
        return slots[~ends], logits[torch.from_numpy(np.flatnonzero(~ends))]

    def _commit(self, slots: np.ndarray, logits: torch.Tensor) -> None:
        """Sample for `slots` [M] from logits [M, V]; append, and finish what has ended."""
        table, sampling = self._table, self._sampling
        logits = sampling.penalised(slots, logits, table)
        if self._constrained:
            self._constrain(slots, logits)
        batch = sampling.batch(slots, table.length[slots])
        tokens, logprobs = self._runner.sample(logits, batch)
        if self._ranked:
            self._rank(slots, logits, batch.temperature)
        table.tokens[slots, table.length[slots]] = tokens
        sampling.logprobs[slots, table.length[slots] - sampling.prompt_length[slots]] = logprobs
        table.length[slots] += 1
        stopped = sampling.stops(slots, tokens)
        if self._constrained:
            stopped |= self._advance(slots, tokens, logprobs)
        ended = stopped | (table.length[slots] >= sampling.limit[slots]) | ~np.isfinite(logprobs)
        for i in np.flatnonzero(ended):
            self._finish(
                int(slots[i]), self._reason(int(slots[i]), int(tokens[i]), bool(stopped[i]), logprobs[i])
            )
        if self._watched:
            self._watch(slots)

    def _constrain(self, slots: np.ndarray, logits: torch.Tensor) -> None:
        """Exclude, in place, the tokens with which a constrained output cannot continue."""
        for row, slot in enumerate(slots.tolist()):
            if slot in self._constrained:
                matcher = self._running[slot].matcher
                assert matcher is not None
                matcher.exclude(logits[row])

    def _advance(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Return [M] whether a stop token has ended a constrained output."""
        ended = np.zeros(len(slots), np.bool_)
        for row, slot in enumerate(slots.tolist()):
            if slot in self._constrained and np.isfinite(logprobs[row]):
                matcher = self._running[slot].matcher
                assert matcher is not None
                matcher.accept(int(tokens[row]))
                ended[row] = matcher.ended
                if matcher.stuck:
                    logprobs[row] = np.nan
        return ended

    def _rank(self, slots: np.ndarray, logits: torch.Tensor, temperature: np.ndarray) -> None:
        """Append the best tokens at the position of each new token, for the requests that list them."""
        for row, slot in enumerate(slots.tolist()):
            if slot in self._ranked:
                request = self._running[slot]
                request.output_ranked.append(
                    best_tokens(logits[row], float(temperature[row]), request.sampling.top_logprobs)
                )

    def _reason(self, slot: int, token: int, stopped: bool, logprob: float) -> Finish:
        if not np.isfinite(logprob):
            self._table.length[slot] -= 1  # the token was sampled from invalid logits
            matcher = self._running[slot].matcher
            if matcher is not None and matcher.stuck:
                return Finish("abort", message="no token of the vocabulary fits the grammar here")
            return Finish("abort", message="the model's logits are not finite; check its weights")
        if stopped:
            return Finish("stop", matched=token)
        matched = self._matched_stop(slot)
        return Finish("length") if matched is None else Finish("stop", matched=matched)

    def _matched_stop(self, slot: int) -> str | None:
        stops = self._running[slot].sampling.stop
        return self._find_stop(self._output(slot)[0], stops) if stops else None

    def _watch(self, slots: np.ndarray) -> None:
        """Finish requests that have reached a stop string, and publish the progress of those that stream."""
        for slot in self._watched.intersection(slots.tolist()):
            request = self._running[slot]
            if (matched := self._matched_stop(slot)) is not None:
                self._finish(slot, Finish("stop", matched=matched))
            elif request.streaming:
                request.output_ids, request.output_logprobs = self._output(slot)
                request.publish()

    def _output(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the ids and logprobs that `slot` has sampled."""
        start, stop = int(self._sampling.prompt_length[slot]), int(self._table.length[slot])
        ids, logprobs = self._table.tokens[slot, start:stop], self._sampling.logprobs[slot, : stop - start]
        return ids.copy(), logprobs.copy()

    def _finish(self, slot: int, finish: Finish) -> None:
        request = self._leave(slot)
        request.finish = finish
        request.publish()

    def _retract(self, slot: int) -> None:
        request = self._leave(slot)
        request.retractions += 1
        self._waiting.appendleft(request)

    def _leave(self, slot: int) -> Request:
        """Remove a request from its slot, keeping its sampled tokens."""
        request = self._running.pop(slot)
        self._watched.discard(slot)
        self._scored.discard(slot)
        self._prompt_only.discard(slot)
        self._constrained.discard(slot)
        self._ranked.discard(slot)
        request.output_ids, request.output_logprobs = self._output(slot)
        self._table.release(slot)
        return request
