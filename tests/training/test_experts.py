"""Mixture-of-experts models compute as in transformers, and keep the names of published checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families_support import build_family, build_tiny, tiny_config
from model_support import CHOSEN, EXPERTS, assert_same, build_moe, packed, reference, samples
from safetensors.torch import load_file, save_file
from training_support import VOCAB, training_data
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig

from areal_agents.algorithms.config import AlgorithmConfig
from areal_agents.algorithms.packing.microbatches import pack
from areal_agents.errors import TrainingError
from areal_agents.training.config import TrainerConfig
from areal_agents.training.distributed import Ranks
from areal_agents.training.model.experts import prepare_replay, rerouted_share, router_of
from areal_agents.training.model.loading import load_weights
from areal_agents.training.model.model import ModelOptions, load_policy
from areal_agents.training.step.optimizer import make_optimizer
from areal_agents.training.step.step import StepOptions, train_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE."""
    return build_moe(tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize("checkpointing", ["off", "full"])
def test_logprobs_and_gradients_are_those_of_transformers(
    checkpointing: str, folder: Path, group: Ranks
) -> None:
    options = ModelOptions(activation_checkpointing=checkpointing)  # type: ignore[arg-type]
    got = packed(load_policy(folder, group, options=options), samples())
    assert any("gate.weight" in name for name in got[1])
    assert_same(got, reference(folder, samples()))


def test_experts_keep_the_names_of_the_folder(folder: Path, tmp_path: Path, group: Ranks) -> None:
    original = load_file(folder / "model.safetensors")
    assert "model.layers.2.mlp.experts.5.gate_proj.weight" in original
    policy = load_policy(folder, group)
    assert load_weights(policy.model, folder) == sum(t.nbytes for t in original.values())
    weights = policy.full_state_dict()
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in original.items())
    save_file(weights, tmp_path / "model.safetensors")  # fails if two tensors share memory


def test_a_folder_with_experts_in_one_tensor_is_loaded(folder: Path, tmp_path: Path, group: Ranks) -> None:
    fused = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].shape == (EXPERTS, 48, 32)
    save_file({n: t.contiguous() for n, t in fused.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = load_policy(tmp_path, group).full_state_dict()
    original = load_file(folder / "model.safetensors")
    assert weights.keys() == original.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in original.items())


def test_a_missing_expert_is_named(folder: Path, tmp_path: Path, group: Ranks) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(TrainingError, match=r"(?s)model\.safetensors.*layers\.2\.mlp\.experts\.gate_up_proj"):
        load_policy(tmp_path, group)


@pytest.mark.parametrize(("router_dtype", "computed"), [(None, torch.bfloat16), (torch.float32,) * 2])
def test_routers_compute_as_in_engines_or_in_float32(
    router_dtype: torch.dtype | None, computed: torch.dtype, folder: Path, group: Ranks
) -> None:
    options = ModelOptions(torch.bfloat16, activation_checkpointing="full", router_dtype=router_dtype)
    policy = load_policy(folder, group, options=options)
    seen: dict[str, set[torch.dtype]] = {"weight": set(), "logits": set()}
    for name, module in policy.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_pre_hook(lambda m, _: seen["weight"].add(m.weight.dtype))
            module.register_forward_hook(lambda _, __, out: seen["logits"].add(out[0].dtype))
    logprobs, gradients = packed(policy, samples())
    assert seen == {"weight": {computed}, "logits": {computed}}
    want = torch.cat(reference(folder, samples())[0])
    assert 0 < (torch.cat(logprobs) - want).abs().mean() < 0.1
    assert {g.dtype for g in gradients.values()} == {torch.float32}


def test_a_step_changes_routers_and_experts(folder: Path, group: Ranks) -> None:
    policy = load_policy(folder, group)
    before = policy.full_state_dict()
    optimizer = make_optimizer(policy, TrainerConfig(lr=1e-2))
    for batch in pack(samples(), token_budget=4096):
        (-policy(batch)[0] * batch.advantages).sum().backward()
    optimizer.step()
    after = policy.full_state_dict()
    assert not [name for name in before if torch.equal(before[name], after[name])]


def recorded(seed: int = 0) -> np.ndarray:
    """Return distinct experts for one token in each of three layers [3, k]; all are -1 for some tokens."""
    rng = np.random.default_rng(seed)
    if seed % 3 == 0:
        return np.full((3, CHOSEN), -1)
    return np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(3)])


def test_recorded_experts_are_used_with_the_current_weights(
    folder: Path, group: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is transformers with routers that are made to choose the recorded experts."""
    routes = {token: recorded(token) for token in range(VOCAB)}
    batch = []
    for sample in samples():
        chosen = np.stack([routes[int(token)] for token in sample.token_ids]).astype(np.int16)
        batch.append(replace(sample, routed_experts=chosen))

    def forced(model: torch.nn.Module) -> None:
        def remember(_: object, args: tuple[torch.Tensor, ...]) -> None:
            model.seen = args[0][0]

        model.model.embed_tokens.register_forward_pre_hook(remember)
        for layer in (0, 2):
            router = model.model.layers[layer].mlp.gate

            def route(hidden: torch.Tensor, router=router, layer=layer):  # noqa: ANN001, ANN202
                probabilities = torch.softmax(hidden @ router.weight.T, -1)
                chosen = torch.from_numpy(np.stack([routes[int(t)][layer] for t in model.seen]))
                chosen = torch.where(chosen < 0, probabilities.topk(CHOSEN).indices, chosen)
                weights = torch.stack([p[c] for p, c in zip(probabilities, chosen, strict=True)])
                return probabilities, weights / weights.sum(-1, keepdim=True), chosen

            router.forward = route

    want = reference(folder, samples(), change=forced)
    plain = reference(folder, samples())
    assert (torch.cat(want[0]) - torch.cat(plain[0])).abs().mean() > 0.01
    for checkpointing in ("off", "full"):
        options = ModelOptions(activation_checkpointing=checkpointing)  # type: ignore[arg-type]
        policy = load_policy(folder, group, options=options)
        for share_prefixes in (True, False):
            assert_same(packed(policy, batch, share_prefixes=share_prefixes), want)
        assert_same(packed(policy, samples()), plain)  # without recorded experts the routers choose


def test_a_step_reports_how_often_the_routers_would_choose_other_experts(folder: Path, group: Ranks) -> None:
    """Two of the three layers have a router; the recorded experts of the middle layer are not counted."""
    policy = load_policy(folder, group)
    chosen = [np.tile(np.arange(CHOSEN, dtype=np.int16), (len(s), 3, 1)) for s in samples()]
    batch = [replace(s, routed_experts=c) for s, c in zip(samples(), chosen, strict=True)]
    result = train_batch(
        policy, make_optimizer(policy, TrainerConfig()), training_data(batch), AlgorithmConfig(),
        StepOptions(microbatch_tokens=4096, share_prefixes=True, grad_clip=1.0),
        ranks=group, version=int(batch[0].versions.max()), seed=0,
    )  # fmt: skip
    found = result.statistics.as_dict()
    assert 0 < found["rerouted_tokens"] <= found["replayed_tokens"] <= found["tokens"]
    assert 0.5 * found["rerouted_tokens"] <= found["rerouted_layers"] <= found["rerouted_tokens"]


@pytest.mark.parametrize("family", ["minimax_m2", "hy_v3", "lfm2_moe"])
def test_routers_with_two_arguments_use_recorded_experts(family: str, tmp_path: Path, group: Ranks) -> None:
    """The oracle is transformers with these routers' formula, in float64, and a forced choice of experts."""
    config = tiny_config(family)
    if family == "hy_v3":
        config.mlp_layer_types, config.router_scaling_factor = ["sparse", "sparse"], 2.5
    if family == "lfm2_moe":
        config.layer_types, config.routed_scaling_factor = ["full_attention"] * 2, 1.5
    scale = {"minimax_m2": 1.0, "hy_v3": 2.5, "lfm2_moe": 1.5}[family]
    folder = build_tiny(config, tmp_path)
    experts = AutoModelForCausalLM.from_pretrained(folder)
    (router, *others) = (router_of(block) for block in experts.get_decoder().layers)
    assert router is not None and len(others) == 1 and others[0] is not None
    count, chosen = router.num_experts, router.top_k
    rng = np.random.default_rng(0)
    routes = {token: np.stack([rng.permutation(count)[:chosen] for _ in range(2)]) for token in range(VOCAB)}
    for token in range(0, VOCAB, 3):
        routes[token][:] = -1  # the router chooses

    def forced(model: torch.nn.Module) -> None:
        seen: list[torch.Tensor] = []
        model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        for layer, block in enumerate(model.get_decoder().layers):
            gate: Any = router_of(block)

            def route(  # noqa: ANN202
                hidden: torch.Tensor, bias: torch.Tensor | None, gate: Any = gate, layer: int = layer
            ):
                logits = hidden.double() @ gate.weight.double().T
                scores = torch.sigmoid(logits)
                taken = torch.from_numpy(np.stack([routes[int(token)][layer] for token in seen[-1]]))
                ranked = scores if bias is None else scores + bias.double()
                taken = torch.where(taken < 0, ranked.topk(chosen).indices, taken)
                weights = torch.stack([s[t] for s, t in zip(scores, taken, strict=True)])
                weights = scale * weights / weights.sum(-1, keepdim=True)
                return logits.float(), weights.float(), taken

            gate.forward = route

    batch = []
    for sample in samples():
        recorded = np.stack([routes[int(token)] for token in sample.token_ids]).astype(np.int16)
        batch.append(replace(sample, routed_experts=recorded))
    want, plain = reference(folder, samples(), change=forced), reference(folder, samples())
    assert (torch.cat(want[0]) - torch.cat(plain[0])).abs().mean() > 0.01
    for checkpointing in ("off", "full"):
        options = ModelOptions(activation_checkpointing=checkpointing)  # type: ignore[arg-type]
        policy = load_policy(folder, group, options=options)
        assert_same(packed(policy, batch), want)
        assert_same(packed(policy, samples()), plain)


def test_recorded_routing_without_a_router_that_replays_is_refused(tmp_path: Path, group: Ranks) -> None:
    policy = load_policy(build_family("afmoe", tmp_path), group)  # its routers are not found by name
    batch = [replace(s, routed_experts=np.zeros((len(s), 2, CHOSEN), np.int16)) for s in samples()]
    with pytest.raises(TrainingError, match="AfmoeForCausalLM has no router that can replay"):
        packed(policy, batch)


def test_the_routing_of_another_model_is_refused(folder: Path, group: Ranks) -> None:
    policy = load_policy(folder, group)
    batch = [replace(s, routed_experts=np.zeros((len(s), 3, CHOSEN + 1), np.int16)) for s in samples()]
    with pytest.raises(TrainingError, match="recorded routing of shape .* serves a different model"):
        packed(policy, batch)
    mixed = [batch[0], replace(batch[1], routed_experts=np.zeros((len(batch[1]), 2, 2), np.int16))]
    with pytest.raises(ValueError, match="must have one shape"):
        pack(mixed, token_budget=4096)


ROUTERS = {
    "softmax": MixtralConfig(num_local_experts=EXPERTS),
    "sigmoid, bias and scale": Glm4MoeConfig(
        n_routed_experts=EXPERTS, first_k_dense_replace=0, n_group=1, topk_group=1, routed_scaling_factor=2.5
    ),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_other_routers_weight_the_recorded_experts_by_their_own_formula(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
    ROUTERS[kind].update({**sizes, **heads, "num_experts_per_tok": CHOSEN, "initializer_range": 0.3})
    model = AutoModelForCausalLM.from_config(ROUTERS[kind], dtype=torch.float32).eval()
    routers = [router_of(block) for block in model.get_decoder().layers]
    chosen: dict[int, torch.Tensor] = {}
    for index, router in enumerate(routers):
        router.register_forward_hook(lambda _, __, out, index=index: chosen.__setitem__(index, out[2]))
    decode = model.get_decoder()
    prepare_replay(model)
    tokens = torch.arange(12)[None]
    plain = decode(tokens, use_cache=False).last_hidden_state
    own = torch.stack([chosen[0], chosen[1]], dim=1)
    same = decode(tokens, use_cache=False, routed_experts=own.flip(-1)).last_hidden_state
    torch.testing.assert_close(same, plain, atol=1e-5, rtol=1e-5)
    other = decode(tokens, use_cache=False, routed_experts=(own + 1) % EXPERTS).last_hidden_state
    assert (other - plain).abs().max() > 1e-2

    # the share of layers in which the router would choose other experts; 0 where no experts were recorded
    decode(tokens, use_cache=False, routed_experts=own.flip(-1))
    assert rerouted_share(model).tolist() == [0.0] * 12  # type: ignore[union-attr]
    second = torch.stack([own[:, 0], (own[:, 1] + 1) % EXPERTS], dim=1)
    second[0] = -1
    decode(tokens, use_cache=False, routed_experts=second)
    assert rerouted_share(model).tolist() == [0.0] + [0.5] * 11  # type: ignore[union-attr]
    decode(tokens, use_cache=False)
    assert rerouted_share(model) is None


def test_a_router_with_another_weighting_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    gate = model.model.layers[0].mlp.gate
    forward = gate.forward

    def squared(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, chosen = forward(hidden)
        return logits, weights**2, chosen

    monkeypatch.setattr(gate, "forward", squared)
    prepare_replay(model)
    routed = torch.zeros(3, 3, CHOSEN, dtype=torch.int64)
    with pytest.raises(TrainingError, match="TopKRouter: recorded routing cannot be replayed"):
        model.get_decoder()(torch.arange(3)[None], use_cache=False, routed_experts=routed)
