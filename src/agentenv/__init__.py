"""AgentENV: isolated agent environments, one microVM each, behind the E2B API."""
