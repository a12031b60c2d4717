"""Examines the rewards of a run before it is trained: what a policy earns that does none of the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_agents.lazy_imports import on_first_use

if TYPE_CHECKING:
    from areal_agents.doctor.rewards.examine import examine_rewards
    from areal_agents.doctor.rewards.report import RewardReport
    from areal_agents.doctor.rewards.show import show_rewards

__all__ = ["RewardReport", "examine_rewards", "show_rewards"]

# The process of a reward function needs none of these modules.
__getattr__ = on_first_use(
    __name__, {"examine": ("examine_rewards",), "report": ("RewardReport",), "show": ("show_rewards",)}
)
