"""PlanPO: reinforcement learning for multi-turn language-model agents."""
