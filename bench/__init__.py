"""Measured figures: every number in docs/promises.md is printed by a program here."""
