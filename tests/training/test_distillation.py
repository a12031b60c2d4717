"""Distillation equals float64 autograd over the definition, and a plain loop with transformers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from presets_support import WHOLE, groups
from stored_support import put_group
from torch import Tensor, nn
from training_support import VOCAB, build_model, make_sample, record_groups
from transformers import AutoModelForCausalLM

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.demonstrations import with_demonstrations
from areal_agents.algorithms.losses.distillation import reverse_kl_top_k
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.algorithms.samples import TrainingData, build_training_data
from areal_agents.core.rollout import RolloutGroup
from areal_agents.core.sample import TrainingSample
from areal_agents.errors import TrainingError
from areal_agents.inference import SGLangEngine, running_engine
from areal_agents.store import Store
from areal_agents.training import run as trainer
from areal_agents.training.batches.checks import Refused, SampleLimits, refused_samples
from areal_agents.training.batches.recorded import RecordedGroups
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.model import ModelOptions, load_policy
from areal_agents.training.run import RunResult, run
from areal_agents.training.step.divergence import FullTargets, TopTargets, reverse_kl, top_logprobs
from areal_agents.training.step.step import StepOptions, StepResult, train_batch
from areal_agents.training.step.teacher import EngineTeacher, HeldTeacher, SelfTeacher, Teacher

LR = 0.05
ROWS, WIDTH, TEACHER_WIDTH, TOKENS = 11, 6, 9, 40


def head(width: int, seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(width, TOKENS, dtype=torch.float64)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the divergence by its definition, over all tokens."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def coarse(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Return the log distribution [N, k + 1] over k tokens and all other tokens together."""
    top = logprobs.exp().gather(1, ids)
    others = torch.ones_like(logprobs).scatter(1, ids, 0)
    return torch.cat([top, (logprobs.exp() * others).sum(-1, keepdim=True)], 1).log()


@pytest.mark.parametrize("rows", [1, 4, 11, 50])
@pytest.mark.parametrize("k", [None, 1, 5])
def test_the_divergence_and_its_gradient_are_those_of_the_definition(rows: int, k: int | None) -> None:
    torch.manual_seed(1)
    policy_head, teacher_head = head(WIDTH, 2), head(TEACHER_WIDTH, 3)
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    teacher_hidden = torch.randn(ROWS, TEACHER_WIDTH, dtype=torch.float64)
    temperatures = torch.rand(ROWS, dtype=torch.float64) + 0.5
    teacher_temperatures = temperatures if k is not None else torch.rand(ROWS, dtype=torch.float64) + 0.5
    weights = torch.randn(ROWS, dtype=torch.float64)
    log_p = torch.log_softmax(policy_head(hidden) / temperatures[:, None], -1)
    log_q = torch.log_softmax(teacher_head(teacher_hidden) / teacher_temperatures[:, None], -1).detach()
    if k is None:
        wanted = kl(log_p, log_q)
        targets: FullTargets | TopTargets = FullTargets(
            teacher_hidden, teacher_head.weight.detach(), teacher_head.bias.detach(), teacher_temperatures
        )
    else:
        ids, values = top_logprobs(teacher_hidden, temperatures, teacher_head, k, chunk_logits=rows * TOKENS)
        assert torch.equal(ids, log_q.topk(k).indices)
        torch.testing.assert_close(values, log_q.topk(k).values)
        wanted = kl(coarse(log_p, ids), coarse(log_q, ids))
        targets = TopTargets(ids, values)
    inputs = (hidden, policy_head.weight, policy_head.bias)
    expected = torch.autograd.grad((wanted * weights).sum(), inputs)
    got = reverse_kl(hidden, temperatures, policy_head, targets, chunk_logits=rows * TOKENS)
    torch.testing.assert_close(got, wanted)
    for ours, theirs in zip(torch.autograd.grad((got * weights).sum(), inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_joining_tokens_never_raises_the_divergence_and_all_tokens_give_it_exactly() -> None:
    torch.manual_seed(0)
    log_p, log_q = (torch.log_softmax(torch.randn(64, TOKENS, dtype=torch.float64), -1) for _ in range(2))
    whole = kl(log_p, log_q)
    before = torch.zeros(64, dtype=torch.float64)
    for k in (1, 2, 8, 20, TOKENS - 1):
        ids = log_q.topk(k).indices
        joined = reverse_kl_top_k(log_p.gather(1, ids), log_q.gather(1, ids))
        assert (joined <= whole + 1e-9).all() and (joined >= before - 1e-3).all()
        before = joined
    rest = 1 - log_q.topk(TOKENS - 1).values.exp().sum(-1)
    kept = rest > 1e-4  # where the least probable token is not clamped
    torch.testing.assert_close(before[kept], whole[kept], rtol=1e-6, atol=1e-9)


def test_a_certain_policy_has_a_finite_divergence_and_gradient() -> None:
    student = torch.tensor([[0.0, -80.0], [-1e-9, -30.0]], dtype=torch.float32, requires_grad=True)
    divergence = reverse_kl_top_k(student, torch.tensor([[-0.5, -1.2], [0.0, -60.0]]))
    divergence.sum().backward()
    assert torch.isfinite(divergence).all() and student.grad is not None
    assert torch.isfinite(student.grad).all()


class Plain:
    """A model that transformers computes in float64, one sample at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    def distribution(self, sample: TrainingSample) -> Tensor:
        """Return the log probabilities [N, V] at the scored tokens."""
        places = np.flatnonzero(sample.scored_mask)
        logits = self.model(torch.tensor(sample.token_ids[None].astype(np.int64))).logits[0, places - 1]
        return torch.log_softmax(logits / torch.tensor(sample.temperatures[places])[:, None], -1)


def loss_of(
    plain: Plain,
    samples: Sequence[TrainingSample],
    teacher: Sequence[Tensor],
    *,
    k: int | None = None,
) -> Tensor:
    """Return Σ_t KL_t / tokens; no token is weighted, whichever policy sampled it."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for sample, log_q in zip(samples, teacher, strict=True):
        log_p = plain.distribution(sample)
        if k is not None:
            ids = log_q.topk(k).indices
            log_p, log_q = coarse(log_p, ids), coarse(log_q, ids)
        total = total + kl(log_p, log_q).sum()
        tokens += len(log_p)
    return total / tokens


def step(
    folder: Path,
    ranks: Ranks,
    data: TrainingData,
    algorithm: AlgorithmConfig,
    teacher: Teacher,
    *,
    options: StepOptions = WHOLE,
) -> tuple[StepResult, dict[str, Tensor]]:
    """Train on one batch by plain SGD."""
    policy = load_policy(folder, ranks)
    result = train_batch(
        policy,
        torch.optim.SGD(policy.parameters(), lr=LR),
        data,
        algorithm,
        options,
        ranks=ranks,
        version=0,
        seed=0,
        teacher=teacher,
    )
    return result, policy.full_state_dict()


def check(plain: Plain, loss: Tensor, result: StepResult, weights: dict[str, Tensor]) -> None:
    """Check that the step equals that of the plain loop."""
    loss.backward()
    largest = 0.0
    for name, parameter in plain.model.named_parameters():
        want = parameter.detach() - LR * parameter.grad
        torch.testing.assert_close(weights[name].double(), want, atol=3e-7, rtol=1e-5)
        largest = max(largest, float(parameter.grad.abs().max()))
    assert LR * largest > 1e-4  # far above the tolerance


def at_one(recorded: list[RolloutGroup]) -> list[RolloutGroup]:
    """Return the groups with the temperature of every turn set to 1."""
    return [
        replace(
            group,
            rollouts=tuple(
                replace(
                    rollout,
                    episode=replace(
                        rollout.episode,
                        turns=tuple(
                            replace(turn, sampling=replace(turn.sampling, temperature=1.0))
                            for turn in rollout.episode.turns
                        ),
                    ),
                )
                for rollout in group.rollouts
            ),
        )
        for group in recorded
    ]


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("teacher"), seed=5)


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_held_teacher_gives_the_step_of_the_plain_loop(
    model_folder: Path, teacher_folder: Path, group: Ranks, share_prefixes: bool
) -> None:
    algorithm = AlgorithmConfig(preset="distillation")
    data = build_training_data(groups(), algorithm)
    assert data.report.dropped_groups == 0 and len({s.group_id for s in data.samples}) == 4
    teacher = HeldTeacher(str(teacher_folder), group, vocab_size=VOCAB, options=ModelOptions())
    options = StepOptions(microbatch_tokens=160, share_prefixes=share_prefixes, grad_clip=1e9)
    result, weights = step(model_folder, group, data, algorithm, teacher, options=options)
    assert result.microbatches > 1
    plain, other = Plain(model_folder), Plain(teacher_folder)
    targets = [other.distribution(sample).detach() for sample in data.samples]
    check(plain, loss_of(plain, data.samples, targets), result, weights)


def test_an_engine_gives_the_step_of_the_plain_loop_over_its_top_tokens(
    model_folder: Path, teacher_folder: Path, group: Ranks
) -> None:
    algorithm = AlgorithmConfig(preset="distillation", teacher="engine", distill_top_k=7)
    data = build_training_data(at_one(groups()), algorithm)
    with running_engine(teacher_folder, kernel="torch", threads=1, slots=8, max_context=512) as url:
        teacher = EngineTeacher(
            lambda: SGLangEngine(url), top=7, vocab_size=VOCAB, timeout_s=60.0, ranks=group
        )
        assert teacher.meet() == 512 - 7
        result, weights = step(model_folder, group, data, algorithm, teacher)
    plain, other = Plain(model_folder), Plain(teacher_folder)
    targets = [other.distribution(sample).detach() for sample in data.samples]
    check(plain, loss_of(plain, data.samples, targets, k=7), result, weights)


def test_an_engine_that_cannot_be_the_teacher_is_refused(
    model_folder: Path, group: Ranks, engine_url: str
) -> None:
    rng = np.random.default_rng(0)
    sample = make_sample(range(2, 12), range(5, 10), rng=rng)

    def teacher(url: str = engine_url, *, vocab: int = VOCAB, timeout_s: float = 60.0) -> EngineTeacher:
        return EngineTeacher(
            lambda: SGLangEngine(url), top=3, vocab_size=vocab, timeout_s=timeout_s, ranks=group
        )

    with pytest.raises(TrainingError, match="a vocabulary of 96 tokens and the policy one of 100"):
        teacher(vocab=100).score([sample])
    hot = make_sample(range(2, 12), range(5, 10), rng=rng, temperature=0.7)
    with pytest.raises(TrainingError, match="a temperature other than 1"):
        teacher().score([hot])
    with pytest.raises(TrainingError, match=r"did not score 1 sequences within 0\.5 s"):
        teacher("http://127.0.0.1:9", timeout_s=0.5).score([sample])
    long = make_sample([2] * 300, range(5, 300), rng=rng)
    with pytest.raises(TrainingError, match="the teacher's engine"):
        teacher().score([long])
    scored = teacher().score([sample, sample])
    assert scored is not None
    assert scored.ids.shape == (10, 3) and torch.equal(scored.ids[:5], scored.ids[5:])


def test_an_unsuitable_teacher_is_refused_before_the_first_batch(group: Ranks, engine_url: str) -> None:
    def meet(url: str, vocab: int, timeout_s: float = 60.0) -> int | None:
        def connect() -> SGLangEngine:
            return SGLangEngine(url)

        return EngineTeacher(connect, top=3, vocab_size=vocab, timeout_s=timeout_s, ranks=group).meet()

    with pytest.raises(TrainingError, match="a vocabulary of 96 tokens and the policy one of 100"):
        meet(engine_url, 100)
    with pytest.raises(
        TrainingError, match=r"did not answer within 0\.5 s .*a server runs at trainer.teacher"
    ):
        meet("http://127.0.0.1:9", VOCAB, timeout_s=0.5)
    with pytest.raises(TrainingError, match="the teacher's engine"):
        meet(engine_url + "/elsewhere", VOCAB)


def refusal(group: RolloutGroup, algorithm: AlgorithmConfig, limits: SampleLimits) -> Refused | None:
    data = build_training_data([group], algorithm)
    return refused_samples(data, algorithm, limits=limits, version=None).get(group.id)


def test_a_group_that_is_longer_than_the_teachers_context_is_refused() -> None:
    algorithm = AlgorithmConfig(preset="distillation", teacher="engine", distill_top_k=7)
    for one in at_one(groups()):
        data = build_training_data([one], algorithm)
        longest = max(int(np.flatnonzero(sample.scored_mask)[-1]) + 1 for sample in data.samples)
        fits, short = (SampleLimits(512, VOCAB, teacher_tokens=n) for n in (longest, longest - 1))
        assert refusal(one, algorithm, fits) is None
        refused = refusal(one, algorithm, short)
        assert refused is not None
        assert (
            f"{longest} tokens is longer than the {longest - 1} that the teacher's engine" in refused.reason
        )


def test_a_group_that_an_engine_cannot_score_is_refused_before_it_is_in_a_batch() -> None:
    engine = AlgorithmConfig(preset="distillation", teacher="engine", distill_top_k=7)
    for algorithm, refused in ((engine, True), (AlgorithmConfig(preset="distillation"), False)):
        verdicts = [refusal(one, algorithm, SampleLimits(512, VOCAB)) for one in groups()]
        assert [v is not None and "a teacher's engine scores at 1" in v.reason for v in verdicts] == [
            refused for _ in verdicts
        ]
    for one in at_one(groups()):
        assert refusal(one, engine, SampleLimits(512, VOCAB)) is None


def run_with_teacher(
    url: str, store: Store, model_folder: Path, run_dir: Path, *, timeout_s: float, stop: threading.Event
) -> RunResult:
    """Train on recorded episodes until the teacher fails or `stop` is set; no checkpoint is saved before."""
    for index in range(4):
        put_group(store, f"g{index}", [0, 1])
    with Store.open(run_dir / "store.db") as own:
        return run(
            TrainerConfig(
                steps=10**6, lr=1e-4, checkpoint_every=10**6, teacher_url=url, teacher_timeout_s=timeout_s
            ),
            AlgorithmConfig(preset="distillation", teacher="engine", distill_top_k=4),
            store=own,
            engines=[],
            model_path=model_folder,
            run_dir=run_dir,
            groups=2,
            max_staleness=0,
            stop=stop,
            recorded=RecordedGroups.read(store, seed=0),
        )


def test_a_run_whose_teacher_dies_ends_with_a_checkpoint_of_the_last_complete_step(
    model_folder: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ends between two batches, and the time limit is short only from then on."""
    run_dir = tmp_path / "distilled"
    metrics = run_dir / "metrics.jsonl"
    with ExitStack() as engine:
        url = engine.enter_context(
            running_engine(model_folder, kernel="torch", threads=1, slots=8, max_context=256)
        )

        asked = EngineTeacher.score

        def score(
            self: EngineTeacher, samples: Sequence[TrainingSample], **options: Any
        ) -> TopTargets | None:
            if metrics.is_file() and metrics.read_text():
                engine.close()
                self = replace(self, timeout_s=0.5)
            return asked(self, samples, **options)

        monkeypatch.setattr(EngineTeacher, "score", score)
        with pytest.raises(TrainingError, match=r"did not score 4 sequences within 0\.5 s"):
            run_with_teacher(url, store, model_folder, run_dir, timeout_s=60.0, stop=threading.Event())
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert [folder.name for folder in (run_dir / "checkpoints").glob("step-*")] == [f"step-{last}"]


def test_a_run_that_waits_for_its_teacher_can_be_stopped(
    model_folder: Path, store: Store, tmp_path: Path
) -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as mute, ExitStack() as asked:

        def stop_when_asked() -> None:
            asked.enter_context(mute.accept()[0])  # accepts the connection and never responds
            stop.set()

        waiter = threading.Thread(target=stop_when_asked)
        waiter.start()
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        result = run_with_teacher(url, store, model_folder, tmp_path / "stopped", timeout_s=600.0, stop=stop)
        waiter.join(60)
    assert result == RunResult(0, 0, finished=False)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_self_distillation_reads_the_best_episode_first_and_trains_the_others(
    model_folder: Path, group: Ranks, minibatches: int
) -> None:
    algorithm = AlgorithmConfig(preset="self_distillation", distill_top_k=9, minibatches=minibatches)
    recorded = groups()
    data = build_training_data(recorded, algorithm)
    scores = {r.episode.id: r.episode.score for g in recorded for r in g.rollouts}
    best = {g.id: max(r.episode.score for r in g.rollouts) for g in recorded}
    assert data.samples and all(scores[s.episode_id] < best[s.group_id] for s in data.samples)
    lower = {r.episode.id for g in recorded for r in g.rollouts if r.episode.score < best[g.id]}
    assert {s.episode_id for s in data.samples} <= lower == set(data.demonstrations)
    result, weights = step(model_folder, group, data, algorithm, SelfTeacher(9))
    assert result.skipped_steps == 0
    if minibatches == 1:  # after the first minibatch the policy has changed, but the teacher has not
        plain = Plain(model_folder)
        prefixed = with_demonstrations(data.samples, data.demonstrations)
        targets = [plain.distribution(sample).detach() for sample in prefixed]
        check(plain, loss_of(plain, data.samples, targets, k=9), result, weights)


def test_a_demonstration_changes_only_the_context() -> None:
    rng = np.random.default_rng(0)
    sample = make_sample(range(2, 12), [5, 6, 9], rng=rng)
    (prefixed,) = with_demonstrations([sample], {"e": np.array([40, 41, 42], np.int32)})
    assert prefixed.token_ids.tolist() == [40, 41, 42, *range(2, 12)]
    for name in ("token_ids", "behavior_logprobs", "temperatures", "advantages", "versions", "turn_index"):
        before, after = getattr(sample, name), getattr(prefixed, name)
        assert after[prefixed.scored_mask].tolist() == before[sample.scored_mask].tolist(), name
    (batch,) = pack([prefixed], token_budget=64)
    assert batch.target_ids.tolist() == [7, 8, 11]


def test_a_teacher_of_another_vocabulary_is_refused(model_folder: Path, group: Ranks) -> None:
    with pytest.raises(TrainingError, match="a vocabulary of 96 tokens and the policy one of 95"):
        HeldTeacher(str(model_folder), group, vocab_size=95, options=ModelOptions())


def test_a_policy_that_is_its_own_teacher_does_not_change(model_folder: Path, group: Ranks) -> None:
    algorithm = AlgorithmConfig(preset="distillation")
    data = build_training_data(groups(), algorithm)
    teacher = HeldTeacher(str(model_folder), group, vocab_size=VOCAB, options=ModelOptions())
    result, _ = step(model_folder, group, data, algorithm, teacher)
    assert abs(result.statistics.as_dict()["loss"]) < 1e-3 and result.grad_norm < 1e-5


def test_a_teacher_that_is_lost_ends_the_run_with_a_checkpoint(
    model_folder: Path, engine_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher is lost in the second batch; the first step is kept, and the batch's group is returned."""
    with Store.open(tmp_path / "run" / "store.db") as store:
        record_groups(store, engine_url, ["a", "b", "c"])
        with running_engine(model_folder, kernel="torch", threads=1, slots=8) as url:
            asked = EngineTeacher.score

            def score(
                self: EngineTeacher, samples: Sequence[TrainingSample], **options: Any
            ) -> TopTargets | None:
                if store.group_counts()["trained"]:
                    self = replace(self, connect=lambda: SGLangEngine("http://127.0.0.1:9"), timeout_s=0.5)
                return asked(self, samples, **options)

            monkeypatch.setattr(EngineTeacher, "score", score)
            with pytest.raises(TrainingError, match=r"did not score .* within 0\.5 s \(trainer\.teacher"):
                trainer.run(
                    TrainerConfig(steps=3, trackers=(), teacher_url=url, checkpoint_every=100, threads=1),
                    AlgorithmConfig(preset="distillation", teacher="engine", distill_top_k=5),
                    store=store,
                    engines=[SGLangEngine(engine_url)],
                    model_path=model_folder,
                    run_dir=tmp_path / "run",
                    groups=1,
                    max_staleness=4,
                    stop=threading.Event(),
                )
        assert (tmp_path / "run" / "checkpoints" / "step-1").is_dir()
        assert store.return_leases(after_step=1) == 1
        assert store.group_counts()["trained"] == 1 and store.group_counts()["complete"] == 2
