"""Examines the rewards of a run before it is trained: what a policy earns that does none of the work."""

from areal_agents.doctor.rewards.examine import examine_rewards
from areal_agents.doctor.rewards.report import RewardReport
from areal_agents.doctor.rewards.show import show_rewards

__all__ = ["RewardReport", "examine_rewards", "show_rewards"]
