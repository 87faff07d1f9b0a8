"""AgentENV: isolated agent environments, one microVM each, behind the E2B API."""

__version__ = "0.1.0"
