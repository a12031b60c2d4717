"""What the trainer of a run needs on each rank, from the config.json of its models only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.errors import AdapterError, TrainingError
from areal_agents.training.checkpoint.export import lora_options
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.memory.activations import Activations, Measurer
from areal_agents.training.memory.states import States, count_states
from areal_agents.training.model.critic import Critic
from areal_agents.training.model.loading import build_model
from areal_agents.training.model.model import ModelOptions, build_without_weights, policy_around
from areal_agents.training.model.run_models import compute_dtype, frozen_models, router_dtype
from areal_agents.training.model.sharding import Checkpointing


class MemoryUnknown(TrainingError):
    """The memory of a model cannot be computed; the model may still be trainable."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on one rank, by purpose.

    Attributes:
        masters: float32 weights that are trained. frozen: weights that are not, of all models.
        optimizer: the state of the optimizers. gradients: this rank's shards.
        gathered, unsharded: whole weights and gradients during a pass, see `States`.
        activations: what is kept from the forward to the backward pass.
        working: temporary memory of a block or of the head during a pass.
        ending: temporary memory at the end of a pass, when no activations are left.
        step: temporary memory of the optimizer's step.
        on_host: what is in host memory instead, see `trainer.offload`.
    """

    masters: int
    frozen: int
    optimizer: int
    gradients: int
    gathered: int
    unsharded: int
    activations: int
    working: int
    ending: int
    step: int
    on_host: int

    @property
    def idle(self) -> int:
        """Bytes that stay between the steps."""
        return self.masters + self.frozen + self.optimizer

    @property
    def in_pass(self) -> int:
        """Bytes in a forward and backward pass."""
        pass_only = self.gathered + self.unsharded + self.activations + self.working
        return self.idle + self.gradients + max(pass_only, self.ending)

    @property
    def in_step(self) -> int:
        """Bytes in a step of the optimizer."""
        return self.idle + self.gradients + self.step

    @property
    def peak(self) -> int:
        """The most bytes at any time."""
        return max(self.in_pass, self.in_step)


class TrainerMemory:
    """The memory of a run's models, for any checkpointing policy and size of micro-batches.

    Args:
        model_path: the folder of the policy, with config.json.
        ranks: this rank; its mesh may be that of `fake_ranks`.
        on_gpu: whether training is on GPUs; decides what `dtype: auto` is, and the head's chunks.
        measured: what other objects of this class have measured; it does not depend on the ranks.

    Raises:
        AdapterError: the adapter of the configuration does not fit the model.
        MemoryUnknown: a model cannot be built or measured without its weights.
    """

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        model_path: Path,
        ranks: Ranks,
        *,
        on_gpu: bool,
        measured: dict[object, Measurer] | None = None,
    ) -> None:
        self.dtype = compute_dtype(config, on_gpu=on_gpu)
        self._path = model_path
        self._context = ranks.context_count
        self._offload = config.offload
        self._reshard = config.reshard
        self._measured: dict[int, list[Activations]] = {}
        with _unknown_if_it_fails(model_path):
            options = ModelOptions(
                dtype=self.dtype,
                lora=lora_options(config.lora),
                router_dtype=router_dtype(config),
                reshard=config.reshard,
            )
            policy = build_without_weights(model_path, policy_around(options), options=options)[1]
            known = {} if measured is None else measured
            key = (model_path, replace(options, reshard="block"), on_gpu)
            if key not in known:
                known[key] = Measurer(
                    policy, dtype=self.dtype, router_dtype=options.router_dtype, on_cpu=not on_gpu
                )
            self._models = [known[key]]
            self._trained = [self._states(model_path, ranks, options, optimized_by=config)]
            if algorithm.needs_critic:
                critic = Path(config.critic_model or model_path)
                headless = (critic, self.dtype, on_gpu)
                if headless not in known:
                    backbone, _ = build_model(critic, head=False)
                    known[headless] = Measurer(
                        backbone,
                        dtype=self.dtype,
                        router_dtype=options.router_dtype,
                        on_cpu=not on_gpu,
                        head=False,
                    )
                self._models.append(known[headless])
                self._trained.append(self._critic_states(critic, ranks, config))
            frozen = replace(options, lora=None, frozen=True, reshard="block")
            self._frozen = [
                self._states(path, ranks, frozen, optimized_by=None)
                for path in frozen_models(config, algorithm, model_path)
            ]
            text = policy.config.get_text_config()
            self.layers = int(text.num_hidden_layers)
            self.positions = int(getattr(text, "max_position_embeddings", 0) or 0)

    @property
    def model_elements(self) -> int:
        """The number of weights of the policy, adapters included."""
        return self._trained[0].model

    def cache_elements(self) -> float:
        """The number of keys and values of one token, over all layers."""
        tokens = 1024
        return self.activations(tokens)[0].cache * self._context / (tokens * self.dtype.itemsize)

    def activations(self, tokens: int) -> list[Activations]:
        """Those of the policy and the critic for micro-batches of this size."""
        if tokens not in self._measured:
            self._measured[tokens] = self._measure(-(-tokens // self._context))
        return self._measured[tokens]

    def need(self, checkpointing: Checkpointing, tokens: int) -> Need:
        """The bytes with these settings.

        Args:
            tokens: of a micro-batch, on all ranks that share it.
        """
        measured = self.activations(tokens)
        largest = max(measured, key=lambda one: one.saved(checkpointing) + one.working(checkpointing))
        models = [*self._trained, *self._frozen]
        need = Need(
            masters=sum(s.trained for s in models),
            frozen=sum(s.frozen for s in models),
            optimizer=sum(s.optimizer for s in self._trained),
            gradients=sum(s.gradients for s in self._trained),
            gathered=self._gathered(),
            unsharded=max(s.unsharded for s in self._trained),
            activations=largest.saved(checkpointing),
            working=largest.working(checkpointing),
            ending=self._ending(),
            step=max(s.step for s in self._trained),
            on_host=0,
        )
        if self._offload == "optimizer":
            by_block = max(s.step_by_block for s in self._trained)
            return replace(need, optimizer=0, step=by_block, on_host=need.optimizer)
        if self._offload == "all":
            gathered = need.gathered + max(s.copied for s in models)
            away = replace(need, masters=0, frozen=0, optimizer=0, gradients=0, step=0, gathered=gathered)
            return replace(away, on_host=need.idle + need.gradients)
        return need

    def _gathered(self) -> int:
        """Whole weights during a pass: of one model, or with `reshard: step` of all that are trained, beside
        those of a frozen one."""
        trained, frozen = ([s.gathered for s in models] for models in (self._trained, self._frozen))
        if self._reshard == "step":
            return sum(trained) + max(frozen, default=0)
        return max(trained + frozen)

    def _ending(self) -> int:
        """Temporary memory at the end of a pass of one model. With `reshard: step` the weights of the other
        trained models are whole then."""
        if self._reshard == "step":
            whole = sum(s.gathered for s in self._trained)
            return max(whole - s.gathered + s.ending for s in self._trained)
        return max(s.ending for s in self._trained)

    def _measure(self, tokens: int) -> list[Activations]:
        with _unknown_if_it_fails(self._path):
            return [model.measure(tokens) for model in self._models]

    def _states(
        self, path: Path, ranks: Ranks, options: ModelOptions, *, optimized_by: TrainerConfig | None
    ) -> States:
        module, model = build_without_weights(path, policy_around(options), options=options)
        return count_states(module, model, ranks, options=options, optimized_by=optimized_by)

    def _critic_states(self, path: Path, ranks: Ranks, config: TrainerConfig) -> States:
        options = ModelOptions(dtype=self.dtype, router_dtype=router_dtype(config), reshard=config.reshard)
        module, model = build_without_weights(
            path, lambda model, _: Critic(model), options=options, head=False
        )
        return count_states(module, model, ranks, options=options, optimized_by=config)


@contextmanager
def _unknown_if_it_fails(model: Path) -> Iterator[None]:
    """Translate what models raise that cannot be built, or that read values of tensors that have none."""
    try:
        yield
    except AdapterError:  # a fault of the configuration, which says nothing about the memory
        raise
    except (TrainingError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise MemoryUnknown(f"the memory of the model {model} is not known: {reason}") from error
